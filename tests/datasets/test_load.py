"""Tasks from files: columns by name, answers in every form, and faults that name the row and the fix."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task


def _load(path: Path, text: str, need_answer: bool = True, **config: Any) -> list[Task]:
    path.write_text(text, encoding="utf-8")
    return load_tasks(DatasetConfig(path=str(path), **config), need_answer=need_answer)


ROWS = [{"id": "a", "question": "1+1?", "answer": "2", "level": 3}, {"id": "b", "question": "2+2?", "answer": "4"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_the_three_formats_give_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    texts = {
        ".jsonl": "\ufeff" + "\n\n".join(map(json.dumps, ROWS)),
        ".json": json.dumps(ROWS),
        ".csv": 'id,question,answer\r\na,1+1?,2\r\n"b",2+2?,4\r\n',
    }
    tasks = _load(tmp_path / f"x{suffix}", texts[suffix])
    assert [(t.id, t.question, t.references) for t in tasks] == [("a", "1+1?", ("2",)), ("b", "2+2?", ("4",))]
    if suffix != ".csv":
        assert tasks[0].info == {"level": 3}


@pytest.mark.parametrize(
    ("answer", "references"),
    [
        ("Ann", ("Ann",)),
        (142.0, ("142",)),
        (0.5, ("0.5",)),
        (7, ("7",)),
        (0, ("0",)),
        (True, ("true",)),
        (["Ann", "Anne", "Ann", 3], ("Ann", "Anne", "3")),
        (" Ann \n", ("Ann",)),
    ],
)
def test_answers_are_text_numbers_or_lists_of_aliases(tmp_path: Path, answer: Any, references: tuple[str, ...]) -> None:
    (task,) = _load(tmp_path / "x.jsonl", json.dumps({"question": "q?", "answer": answer}))
    assert task.references == references


@pytest.mark.parametrize("answer", [None, "", " ", [], [""], {"a": 1}, [["a"]]])
def test_a_row_without_a_usable_answer_is_refused_with_its_line(tmp_path: Path, answer: Any) -> None:
    text = "\n".join([json.dumps({"question": "p?", "answer": "x"}), json.dumps({"question": "q?", "answer": answer})])
    with pytest.raises(DataError, match=r"x\.jsonl:2"):
        _load(tmp_path / "x.jsonl", text)


def test_answers_may_be_absent_where_none_is_needed(tmp_path: Path) -> None:
    tasks = _load(tmp_path / "x.jsonl", '{"question": "p?"}\n{"question": "q?", "answer": "a"}', need_answer=False)
    assert [t.references for t in tasks] == [(), ()]


def test_wrong_columns_list_found_and_needed_ones_one_row_and_the_fix(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "golden_answers": ["2"], "unique_id": 1}
    with pytest.raises(DataError) as caught:
        _load(tmp_path / "x.jsonl", json.dumps(row))
    for part in ("question", "answer", "'problem'", "'golden_answers'", "'unique_id'", "1+1?"):
        assert part in caught.value.cause
    assert "data.columns: {question: <column>, answer: <column>}" in caught.value.fix
    (task,) = _load(
        tmp_path / "x.jsonl",
        json.dumps(row),
        columns={"question": "problem", "answer": "golden_answers", "id": "unique_id"},
    )
    assert (task.id, task.question, task.references, dict(task.info)) == ("1", "1+1?", ("2",), {})
    with pytest.raises(DataError, match="'Question'"):
        _load(tmp_path / "x.jsonl", json.dumps({"question": "q", "answer": "a"}), columns={"question": "Question"})
    with pytest.raises(ConfigError, match=r"data\.columns\.questoin"):
        _load(tmp_path / "x.jsonl", json.dumps(row), columns={"questoin": "problem"})


def test_a_later_row_without_a_column_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:3.*'answer'"):
        _load(tmp_path / "x.jsonl", '{"question": "p?", "answer": "x"}\n\n{"question": "q?"}')


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("x.jsonl", '{"question": "p?", "answer": "x"}\n{"question": ', r"x\.jsonl:2: broken JSON"),
        ("x.jsonl", "[1]", r"x\.jsonl:1: an array, not an object"),
        ("x.jsonl", "", "empty"),
        ("x.jsonl", " \n\n", "empty"),
        ("x.json", '[\n{"question": }]', r"x\.json:2: broken JSON"),
        ("x.json", "[]", "empty"),
        ("x.json", '{"question": "q"}', "an object, not an array"),
        ("x.json", '[{"question": "q", "answer": "a"}, 3]', "item 2: a number, not an object"),
        ("x.csv", "question,answer\n", "no rows"),
        ("x.csv", "question,answer\np,x\nq,a,b\n", r"x\.csv:3: another number of cells"),
        ("x.csv", "question,answer\nq\n", r"x\.csv:2: another number of cells"),
        ("x.csv", 'question,answer\n"q"x,a\n', r"x\.csv:2: broken CSV"),
        ("x.csv", "question,answer,answer\nq,a,b\n", "twice in the header"),
        ("x.parquet", "PAR1", "not a .jsonl"),
        ("x.jsonl", '{"question": "  ", "answer": "x"}', "not a question"),
        ("x.jsonl", '{"question": 3, "answer": "x"}', "not a question"),
        ("x.jsonl", '{"question": "\\ud800?", "answer": "x"}', "surrogate"),
        ("x.jsonl", '{"id": null, "question": "q", "answer": "x"}', "the id None"),
    ],
)
def test_malformed_data_is_refused_with_its_place(tmp_path: Path, name: str, text: str, cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        _load(tmp_path / name, text)


def test_a_missing_file_and_other_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load_tasks(DatasetConfig(path=str(tmp_path / "x.jsonl")))
    (tmp_path / "x.csv").write_bytes("question,answer\nWo wär\u2019s?,a".encode("latin-1", "replace"))
    with pytest.raises(DataError, match="UTF-8"):
        load_tasks(DatasetConfig(path=str(tmp_path / "x.csv")))
    with pytest.raises(ConfigError, match=r"data\.path"):
        load_tasks(DatasetConfig())


def test_line_ends_inside_json_text_do_not_split_a_row(tmp_path: Path) -> None:
    (task,) = _load(tmp_path / "x.jsonl", json.dumps({"question": "a\u2028b\x85c?", "answer": "x"}, ensure_ascii=False))
    assert task.question == "a\u2028b\x85c?"


def test_duplicate_ids_are_refused_and_made_ids_are_stable_and_distinct(tmp_path: Path) -> None:
    rows = [{"id": 1, "question": "p?", "answer": "x"}, {"id": "1", "question": "q?", "answer": "y"}]
    with pytest.raises(DataError, match=r"x\.jsonl:2: the id '1' is taken by .*x\.jsonl:1"):
        _load(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    rows = [{"question": q, "answer": "x"} for q in "aba"]
    first = [t.id for t in _load(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))]
    again = [t.id for t in _load(tmp_path / "y.json", json.dumps(rows[1:]))]
    assert len(set(first)) == 3
    assert first[2] == f"{first[0]}-2"
    assert again == [first[1], first[0]]


def test_a_limit_takes_the_first_rows_and_paths_start_from_base(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(ROWS))
    (task,) = load_tasks(DatasetConfig(path="x.json", limit=1), base=tmp_path)
    assert task.id == "a"


def test_embedded_sets_load_by_name_and_refuse_keys_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("agentrl.data.invented")
    fake.generate = lambda split, n, seed: [Task(f"{split}-{seed}-{i}", "q?", ("a",)) for i in range(n)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agentrl.data.invented", fake)
    tasks = load_tasks(DatasetConfig(path="invented", split="eval", limit=3), seed=5)
    assert [t.id for t in tasks] == ["eval-5-0", "eval-5-1", "eval-5-2"]
    assert load_tasks(DatasetConfig(path="invented"))[0].id == "train-0-0"
    with pytest.raises(ConfigError, match="no split"):
        load_tasks(DatasetConfig(path="invented", split="test"))
    with pytest.raises(ConfigError, match="no effect"):
        load_tasks(DatasetConfig(path="invented", columns={"id": "x"}))
    with pytest.raises(ConfigError, match="no effect"):
        load_tasks(DatasetConfig(path="x.jsonl", split="test"))
    fake.generate = lambda split, n, seed: [Task("same", "q?", ("a",))] * 2  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="same"):
        load_tasks(DatasetConfig(path="invented"))


@pytest.mark.parametrize(
    ("name", "columns", "count"),
    [
        ("gsm8k_test.jsonl", {}, 1319),
        ("math500.jsonl", {"question": "problem"}, 500),
        ("aime_1983_2024.json", {"question": "prompt"}, 933),
        ("amc.json", {"question": "prompt"}, None),
        ("hotpot_qa.json", {}, None),
        ("popqa.jsonl", {"answer": "golden_answers"}, None),
        ("triviaqa.jsonl", {"answer": "golden_answers"}, None),
        ("2wiki_local_dev.jsonl", {}, 200),
    ],
)
def test_real_sets_load(data_dir: Path, name: str, columns: dict[str, str], count: int | None) -> None:
    tasks = load_tasks(DatasetConfig(path=name, columns=columns), base=data_dir)
    assert count is None or len(tasks) == count
    assert all(t.references and t.question for t in tasks)
    if name == "amc.json":
        assert tasks[0].references == ("142",)


def test_raw_gsm8k_with_wrong_columns_names_them(data_dir: Path) -> None:
    with pytest.raises(DataError, match=r"'problem'.*found the columns 'question', 'answer'"):
        load_tasks(DatasetConfig(path="gsm8k_train.jsonl", columns={"question": "problem"}), base=data_dir)
