"""Public benchmarks: their published rows as tasks, and what is said where a file is missing or malformed."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.data import data_list, data_show
from agentrl.config.schema import DatasetConfig
from agentrl.data import BENCHMARKS, load_tasks
from agentrl.errors import ConfigError, DataError
from agentrl.grading.code import CodeGrader
from agentrl.types import Task, Trajectory

GPQA = {
    "Question": "Which is a metal?",
    "Correct Answer": "iron ",
    "Incorrect Answer 1": "salt",
    "Incorrect Answer 2": "wood",
    "Incorrect Answer 3": "wax",
    "Record ID": "rec1",
}
MBPP = {
    "task_id": 2,
    "prompt": "Write a function that doubles a number.",
    "test_list": [f"assert twice({i}) == {2 * i}" for i in range(4)],
    "test_imports": ["import math"],
    "test": "for i in range(9):\n    assert math.isclose(twice(i), 2 * i)\n",
}


def _rows(path: Path, name: str, rows: list[dict[str, Any]], seed: int = 0) -> list[Task]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return load_tasks(DatasetConfig(path=str(path), format=name), seed=seed)


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    return lambda name, *given, seed=0: _rows(tmp_path / "x.jsonl", name, list(given), seed)


@pytest.mark.parametrize(
    ("name", "row", "question", "reference"),
    [
        ("math500", {"problem": "1+1?", "answer": "2", "unique_id": "a/1"}, "1+1?", "2"),
        ("gsm8k", {"question": "How many?", "answer": "3 <<3=3>>3\n#### 1,234"}, "How many?", "1234"),
        ("aime2025", {"problem": "Find n.", "answer": 70.0, "problem_idx": 4}, "Find n.", "70"),
        ("aime2026", {"prompt": "Find m.", "answer": 7}, "Find m.", "7"),
        ("hotpotqa", {"id": "h", "question": "Who?", "answer": "Ann", "context": {}}, "Who?", "Ann"),
        ("bamboogle", {"Question": "Where?", "Answer": "Rome"}, "Where?", "Rome"),
    ],
)
def test_a_question_and_its_answer_are_read_as_published(
    rows: Any, name: str, row: dict[str, Any], question: str, reference: str
) -> None:
    (task,) = rows(name, row)
    assert (task.question, task.references) == (question, (reference,))
    assert task.info["form"] == BENCHMARKS[name].answer


def test_gpqa_options_are_shuffled_by_seed_and_question_alone(rows: Any) -> None:
    others = [{**GPQA, "Question": f"Which {i}?", "Record ID": f"r{i}"} for i in range(20)]
    first = rows("gpqa_diamond", *others)
    again = {t.id: t for t in rows("gpqa_diamond", *others[::-1], GPQA)}
    assert all(again[t.id].question == t.question for t in first)
    assert {t.references[0] for t in first} == set("ABCD")
    assert any(again[t.id].question != t.question for t in rows("gpqa_diamond", *others, seed=1))
    for task in first:
        (right,) = task.references
        assert task.info["options"][right] == "iron"
        assert f"\n{right}. iron" in task.question


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "options": {"A": "ant", "B": "bee"}, "answer_idx": "B", "answer": "bee"},
        {"question": "Which?\nA. ant\nB. bee\n\nA. ant\nB. bee", "options": ["A. ant", "B. bee"], "answer": "bee"},
    ],
)
def test_medqa_options_may_be_an_object_or_a_list_and_stand_there_once(rows: Any, row: dict[str, Any]) -> None:
    (task,) = rows("medqa", row)
    assert task.question == "Which?\n\nA. ant\nB. bee"
    assert task.references == ("B",)


def _passes(task: Task, program: str) -> float | None:
    trajectory = Trajectory("t/0", task, 0, (), program, "ok")
    return asyncio.run(CodeGrader().score(task, trajectory)).value


sandboxed = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the sandbox needs bubblewrap")


@sandboxed
def test_mbpp_plus_shows_three_tests_and_runs_them_all(rows: Any) -> None:
    (task,) = rows("mbpp_plus", MBPP)
    assert task.question.count("assert") == 3
    assert _passes(task, "def twice(x):\n    return 2 * x\n") == 1.0
    assert _passes(task, "def twice(x):\n    return {0: 0, 1: 2, 2: 4}.get(x)\n") == 0.0


def _lcb(cases: list[dict[str, str]], private: list[dict[str, str]], **own: Any) -> dict[str, Any]:
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(private)))).decode()
    base = {"question_content": "Add.", "question_id": "q", "starter_code": "", "metadata": "{}"}
    return {**base, "public_test_cases": json.dumps(cases), "private_test_cases": packed, **own}


@sandboxed
def test_livecodebench_runs_public_and_private_cases_of_both_kinds(rows: Any) -> None:
    stdin = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
    private = [{"input": "2 5\n", "output": "7\n", "testtype": "stdin"}]
    (task,) = rows("livecodebench", _lcb(stdin, private))
    assert len(task.info["cases"]) == 2
    assert _passes(task, "print(sum(map(int, input().split())))") == 1.0
    assert _passes(task, "print(3)") == 0.0
    calls = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
    starter = "class Solution:\n    def add(self, xs: list[int], y: int) -> list[int]:\n"
    (task,) = rows("livecodebench", _lcb(calls, [], starter_code=starter, metadata='{"func_name": "add"}'))
    assert starter.strip() in task.question
    assert _passes(task, f"{starter}        return [x + y for x in xs]\n") == 1.0
    assert _passes(task, f"{starter}        return xs\n") == 0.0


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("pwned"),))


def test_private_cases_that_are_no_plain_text_are_refused_unopened(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = base64.b64encode(zlib.compress(pickle.dumps(_Evil()))).decode()
    with pytest.raises(DataError, match="only a text may stand there"):
        rows("livecodebench", {**_lcb([], []), "private_test_cases": evil})
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("name", "row", "fault"),
    [
        ("gsm8k", {"question": "?", "answer": "18"}, r"x.jsonl:1: 'answer' does not end in '#### NUMBER'"),
        ("math500", {"question": " ", "answer": "1"}, r"no text in 'problem' or 'question' or 'prompt'"),
        ("medqa", {"question": "?", "options": ["A. x"], "answer": "y"}, r"the answer 'y' is not one of the options"),
        ("gpqa_diamond", {"Question": "?"}, r"no text in 'Correct Answer'"),
        ("mbpp_plus", {"prompt": "?", "test_list": []}, r"no tests in 'test_list'"),
        ("livecodebench", {"question_content": "?"}, r"neither public nor private test cases"),
    ],
)
def test_a_row_of_another_layout_is_refused_with_its_place(
    rows: Any, name: str, row: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError, match=fault):
        rows(name, row)


def test_a_benchmark_that_is_not_here_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    for name, entry in BENCHMARKS.items():
        with pytest.raises(DataError) as caught:
            load_tasks(DatasetConfig(path=name))
        assert str(tmp_path / "data" / f"{name}.jsonl") in caught.value.cause
        assert entry.source in caught.value.fix
        assert entry.columns in caught.value.fix


def test_a_benchmark_is_found_by_its_name_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bamboogle.csv").write_text("Question,Answer\nWhere?,Rome\nWho?,Ann\n")
    assert [t.references[0] for t in load_tasks(DatasetConfig(path="bamboogle", limit=1))] == ["Rome"]
    assert len(load_tasks(DatasetConfig(path="bamboogle", format="bamboogle"))) == 2
    data_list(json_output=True)
    listed = {e["name"]: e for e in json.loads(capsys.readouterr().out)}
    assert listed["bamboogle"]["file"].endswith("bamboogle.csv")
    assert listed["math500"]["file"] is None
    data_show("bamboogle")
    assert "bamboogle: 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"format": "gsm9k"}, "'gsm9k' is no benchmark"),
        ({"format": "gsm8k", "columns": {"answer": "a"}}, "data.columns: has no effect"),
        ({"format": "gsm8k", "split": "test"}, "data.split: has no effect"),
        ({"format": "gsm8k", "path": "invented"}, "data.format: has no effect with the set 'invented'"),
        ({"format": "gsm8k", "path": "math500"}, "data.format: has no effect with the set 'math500'"),
    ],
)
def test_keys_without_effect_are_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_tasks(DatasetConfig(**{"path": "x.jsonl", **config}))


def test_equal_rows_are_numbered_and_equal_ids_refused(rows: Any) -> None:
    row = {"problem": "1+1?", "answer": "2"}
    first, second = rows("math500", row, row)
    assert second.id == f"{first.id}-2"
    with pytest.raises(DataError, match="is taken by"):
        rows("math500", {**row, "id": 1}, {**row, "id": 1})


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("math500", "math500.jsonl", 500),
        ("gsm8k", "gsm8k_test.jsonl", 1319),
        ("medqa", "medqa.json", 300),
        ("hotpotqa", "hotpot_qa.json", 7405),
        ("aime2025", "aime_1983_2024.json", 933),
    ],
)
def test_the_published_files_load_whole(data_dir: Path, name: str, file: str, count: int) -> None:
    tasks = load_tasks(DatasetConfig(path=str(data_dir / file), format=name))
    assert len(tasks) == count
    assert all(task.references[0].strip() for task in tasks)
    if name == "medqa":
        assert all(task.question.count("\nA. ") == 1 for task in tasks)
        assert {task.references[0] for task in tasks} == set("ABCD")
    if name == "gsm8k":
        assert all(float(task.references[0]) is not None for task in tasks)
