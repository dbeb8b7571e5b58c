"""`agentrl data`: what a file or an embedded set holds."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from agentrl.cli.data import data_list, data_prepare, data_show
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = types.ModuleType("agentrl.data.invented")
    fake.generate = lambda split, n, seed: [Task(f"{split}{i}", "q?", ("a", "b")) for i in range(n)]  # type: ignore[attr-defined]
    fake.corpus = lambda: [{"title": "T", "text": "x"}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "agentrl.data.invented", fake)
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))


def test_list_names_embedded_sets_and_splits(capsys: pytest.CaptureFixture[str]) -> None:
    assert data_list() == 0
    assert "invented\ttrain" in capsys.readouterr().out
    data_list(json_output=True)
    assert json.loads(capsys.readouterr().out)[0]["splits"].keys() == {"train", "eval"}


def test_show_prints_columns_counts_and_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "p\\u001b[2J?", "answer": "x"}\n{"question": "q?", "answer": null}\n')
    assert data_show(str(path)) == 0
    out = capsys.readouterr().out
    assert "2 rows" in out
    assert "answer\t1\tx" in out
    assert "\x1b" not in out
    with pytest.raises(DataError):
        data_show(str(tmp_path / "none.jsonl"))


@pytest.mark.usefixtures("invented")
def test_show_takes_an_embedded_set(capsys: pytest.CaptureFixture[str]) -> None:
    data_show("invented", json_output=True)
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [t["name"] for t in tables] == ["invented, train", "invented, eval"]
    assert tables[0]["row"]["answer"] == ["a", "b"]


@pytest.mark.usefixtures("invented")
def test_prepare_writes_splits_and_corpus_that_load_as_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_prepare("invented", json_output=True)
    files = json.loads(capsys.readouterr().out)["files"]
    assert set(files) == {"train", "eval", "corpus"}
    assert all(Path(path).is_relative_to(tmp_path) for path in files.values())
    assert data_show(files["eval"]) == 0
    with pytest.raises(ConfigError, match="no embedded set"):
        data_prepare("nothing")
