"""A sweep on tiny models: a training run and an evaluation per pair, in one table with a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import ConfigError, DataError
from agentrl.files import read_lines
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.sweep import ROWS, by_column, column_of, sweep, table
from agentrl.recipes.registry import Silence, VerbOptions
from agentrl.types import Task


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe(place):
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
        "launch": {"gpus": 0, "threads": 1},
        "run": {"steps": 3, "dir": str(place), "name": "swept", "save_every": 1},
    }
    return RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)


@pytest.fixture(scope="module")
def swept(recipe):
    """A sweep that nothing interrupts."""
    return sweep(recipe, VerbOptions())


def test_a_sweep_trains_and_evaluates_every_pair(swept):
    result, folder = swept, Path(swept["run"])
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


class Break(Silence):
    """Ctrl-C, or a kill, when the sweep tells of `phase` or of a step's metrics after `note` was told."""

    def __init__(self, note, phase=None, step=None):
        self.note_wanted, self.phase_wanted, self.step_wanted, self.armed = note, phase, step, False

    def note(self, text):
        self.armed = self.armed or text == self.note_wanted

    def phase(self, name, done=0, of=0):
        if self.armed and name == self.phase_wanted:
            raise KeyboardInterrupt

    def log(self, step, metrics):
        if self.armed and step == self.step_wanted:
            raise KeyboardInterrupt


def without_seconds(result):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result["rows"]]


def named(recipe, name, **run):
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name, **run})})


def cells_in(folder):
    return [(row["latent_steps"], row["seed"]) for row in read_lines(folder / ROWS)]


def test_a_sweep_that_broke_off_ends_with_the_table_of_one_that_did_not(recipe, swept, place):
    recipe, folder = named(recipe, "broken"), place / "broken"
    with pytest.raises(KeyboardInterrupt):  # in an evaluation
        sweep(recipe, VerbOptions(progress=Break("m = 0, seed 4", phase="zero")))
    assert cells_in(folder) == [(0, 3)]
    with pytest.raises(KeyboardInterrupt):  # in a training run, after step 2 of 3 and before its checkpoint
        sweep(recipe, VerbOptions(resume=True, progress=Break("m = 2, seed 3", step=2)))
    assert cells_in(folder) == [(0, 3), (0, 4)]
    with (folder / ROWS).open("ab") as file:
        file.write(b'{"latent_steps":2,"seed":3,"ev')  # a torn line is no row
    done = sweep(recipe, VerbOptions(resume=True))
    assert without_seconds(done) == without_seconds(swept)
    assert cells_in(folder) == [(0, 3), (0, 4), (2, 3), (2, 4)]
    table_of = {name: (place / name / "table.md").read_text("utf-8") for name in ("swept", "broken")}
    shares = {name: [line.rsplit("|", 2)[0] for line in text.splitlines()] for name, text in table_of.items()}
    assert shares["swept"] == shares["broken"]
    attempts = sorted(p.name for p in (folder / "m2-seed3" / "logs").glob("attempt_*.log"))
    assert attempts == ["attempt_1.log", "attempt_2.log"]
    assert "step 1 begins" not in (folder / "m2-seed3" / "logs" / "attempt_2.log").read_text("utf-8")
    for links in ("checkpoints/latest/links/outer-a-b.safetensors", "checkpoints/latest/links/inner-a.safetensors"):
        both = [load_file(place / name / "m2-seed3" / links) for name in ("swept", "broken")]
        assert all(torch.equal(tensor, both[1][key]) for key, tensor in both[0].items())


def test_a_sweep_goes_on_with_more_seeds_and_refuses_rows_that_do_not_compare(recipe):
    own = recipe.recursivemas.sweep.model_copy(update={"latent_steps": (0,), "seeds": (3,)})
    recipe = named(recipe, "grown")
    fewer = recipe.recursivemas.model_copy(update={"sweep": own})
    first = sweep(recipe.model_copy(update={"recursivemas": fewer}), VerbOptions())
    more = fewer.model_copy(update={"sweep": own.model_copy(update={"seeds": (4, 3)})})
    recipe = recipe.model_copy(update={"recursivemas": more})
    with pytest.raises(ConfigError, match=r"run\.steps: the run was started with 3, now it is 4"):
        sweep(named(recipe, "grown", steps=4), VerbOptions(resume=True))
    done = sweep(recipe, VerbOptions(resume=True))
    assert [row["seed"] for row in done["rows"]] == [4, 3]
    assert done["rows"][1] == first["rows"][0]


def test_one_round_steps_unroll_one_round(swept):
    lines = (Path(swept["run"]) / "m2-seed3" / "metrics.jsonl").read_text("utf-8").splitlines()
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
