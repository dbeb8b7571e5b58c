"""A sweep on tiny models: a training run and an evaluation per pair, in one table with a plot."""

from __future__ import annotations

import json

import pytest

from agentrl.errors import DataError
from agentrl.recipes.recursivemas.config import RecursiveRecipe
from agentrl.recipes.recursivemas.sweep import by_column, column_of, sweep, table
from agentrl.recipes.registry import VerbOptions
from agentrl.types import Task


@pytest.fixture
def recipe(tmp_path):
    own = {
        "style": "custom",
        "decoder": "b",
        "rounds": 2,
        "latent_steps": 2,
        "answer": "short",
        "roles": {
            "a": {"first": "{task.note}", "prompt": "{task.note} {b}"},
            "b": {"prompt": "Heard: {a}."},
        },
        "edges": [{"source": "a", "target": "b"}, {"source": "b", "target": "a", "feedback": True}],
        "controls": ["zero"],
        "sweep": {"latent_steps": [0, 2], "seeds": [3, 4], "by": "digits"},
        "train": {"stage": "both", "inner_steps": 1, "batch": 2, "one_round_steps": 1},
    }
    data = {
        "method": "recursivemas",
        "model": {"name": "tiny-llama", "mode": "frozen", "dtype": "float32"},
        "data": {
            "path": "channel-numbers",
            "limit": 8,
            "eval": {"path": "channel-numbers", "split": "eval", "limit": 12},
        },
        "recursivemas": own,
        "agents": {"b": {"sampling": {"temperature": 0.0, "max_tokens": 3}}},
        "run": {"steps": 3, "dir": str(tmp_path / "runs"), "name": "swept"},
    }
    return RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)


def test_a_sweep_trains_and_evaluates_every_pair(recipe, tmp_path):
    result = sweep(recipe, VerbOptions())
    folder = tmp_path / "runs" / "swept"
    assert [(row["latent_steps"], row["seed"]) for row in result["rows"]] == [(0, 3), (0, 4), (2, 3), (2, 4)]
    for row in result["rows"]:
        assert row["eval"]["n"] == 12
        assert set(row["controls"]) == {"zero"}
        assert {value: block["n"] for value, block in row["by"].items()} == {str(d): 2 for d in range(1, 7)}
    assert (folder / "table.md").read_text("utf-8").count("\n") == 6
    assert (folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((folder / "summary.json").read_text("utf-8"))["rows"] == result["rows"]
    summary = json.loads((folder / "m2-seed3" / "summary.json").read_text("utf-8"))
    assert summary["latent_steps"] == 2
    assert summary["links"]["training"]["outer-a-b"]["seed"] == 3
    assert not (folder / "m0-seed3").exists()  # empty slots: nothing to train


def test_one_round_steps_unroll_one_round(recipe, tmp_path):
    sweep(recipe, VerbOptions())
    lines = (tmp_path / "runs" / "swept" / "m2-seed3" / "metrics.jsonl").read_text("utf-8").splitlines()
    done = [json.loads(line) for line in lines]
    steps = {r["step"]: r["recursivemas/latent_steps"] for r in done if "recursivemas/latent_steps" in r}
    # The first trains inner links; then two questions, m = 2: one rollout each in one round, three in two.
    assert steps == {1: 0, 2: 4, 3: 12}


def test_accuracy_by_column_is_of_its_own_rows():
    block = {"items": {"x": 1.0, "y": 0.0, "z": None}}
    found = by_column(block, {"x": "1", "y": "2", "z": "2"})
    assert (found["1"]["score"], found["2"]["score"], found["2"]["missing"]) == (1.0, 0.0, 1)
    row = {"latent_steps": 4, "seed": 0, "eval": {"score": 0.5}, "controls": {"zero": {"score": 0.0}}}
    text = table([{**row, "by": found, "seconds": {"training": 12.4}}])
    assert text.splitlines()[2] == "| 4 | 0 | 0.500 | 0.000 | 1.000 | 0.000 | 12 |"


def test_a_column_that_rows_lack_is_refused():
    with pytest.raises(DataError, match=r"sweep\.by: 1 of 1 held-out rows have no column 'digits'"):
        column_of("digits", [Task("t", "q", ("a",))])
