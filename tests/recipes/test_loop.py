"""The loop around the steps of every method, on a run whose only weight is a count."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.schema import RunConfig
from agentrl.errors import DataError
from agentrl.recipes.loop import Training, checkpoint, evaluated, evaluates, newest_checkpoint, run_steps
from agentrl.recipes.recursivemas.training import LinkTraining
from agentrl.recipes.registry import Silence, VerbOptions
from agentrl.run import Run
from agentrl.types import Task

TASKS = (Task("a", "?", ("1",)), Task("b", "?", ("2",)))


class Notes(Silence):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: list[tuple[int, int]] = []

    def begin(self, total: int, first: int = 1) -> None:
        self.begun.append((total, first))

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Counting:
    """A run that adds the step to its weight, and is as good as its weight."""

    run: Run
    recipe: Any
    options: VerbOptions
    tasks: tuple[Task, ...] = TASKS
    held_out: tuple[Task, ...] = TASKS
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)
    weight: int = 0
    seen: list[str] = field(default_factory=list)

    async def restore(self) -> int:
        found = newest_checkpoint(self)
        if found is None:
            return 1
        self.weight = found.state["weight"]
        return found.step + 1

    def save(self, step: int) -> None:
        self.seen.append(f"save {step}")
        with checkpoint(self, step, {"weight": self.weight}) as folder:
            (folder / "weight").write_text(str(self.weight))

    def summarise(self, step: int, status: str) -> dict[str, Any]:
        self.seen.append(f"{status} {step}")
        result = {"steps": step, "status": status, **evaluated(self, step)}
        self.run.write_summary(result)
        return {"run": str(self.run.path), **result}


async def step_body(t: Counting, step: int) -> None:
    t.weight += step
    t.seen.append(f"step {step}")
    t.run.log_metrics({"step": step})
    if evaluates(t.recipe.run, step):
        await evaluate(t, step)


async def evaluate(t: Counting, step: int) -> None:
    t.seen.append(f"eval {step}")
    t.evals[step] = {"a": float(t.weight), "b": None}


def go(folder: Path, steps: int, *, stop_in: int | None = None, resume: bool = False, tasks=TASKS, **run: Any):
    """The run and its summary; a signal arrives within step `stop_in`."""
    config = RunConfig(steps=steps, name="r", dir=str(folder), **{"save_every": 2, "eval_every": 3, **run})
    interrupt = SimpleNamespace(requested=False)
    notes = Notes()
    with Run.create(str(folder), "r", "a: 1\n", resume, 0) as opened:
        t = Counting(opened, SimpleNamespace(run=config), VerbOptions(progress=notes), tasks)

        async def body(t: Counting, step: int) -> None:
            await step_body(t, step)
            interrupt.requested = step == stop_in

        try:
            summary = asyncio.run(run_steps(t, body, evaluate, interrupt))
        except KeyboardInterrupt:
            summary = None
    return t, summary, notes


def test_a_run_evaluates_before_it_steps_saves_at_its_interval_and_last_and_is_summarised(tmp_path):
    t, summary, notes = go(tmp_path, 5)
    steps = ["step 1", "step 2", "save 2", "step 3", "eval 3", "step 4", "save 4", "step 5", "eval 5", "save 5"]
    assert t.seen == ["eval 0", *steps, "done 5"]
    assert notes.begun == [(5, 1)]
    assert (summary["status"], summary["eval_before"]["score"], summary["eval_after"]["score"]) == ("done", 0.0, 15.0)
    assert summary["rise"]["value"] == 15.0
    assert summary["eval_after"]["missing"] == 1
    manifest = json.loads((t.run.path / "checkpoints/step_000005/manifest.json").read_text())
    assert manifest["score"] == 15.0  # of the score that is there


def test_without_intervals_only_the_last_step_is_saved_and_evaluated(tmp_path):
    t, _, _ = go(tmp_path, 3, save_every=0, eval_every=0)
    assert t.seen == ["eval 0", "step 1", "step 2", "step 3", "eval 3", "save 3", "done 3"]


def test_an_interrupted_run_saves_its_step_and_goes_on_to_the_same_end(tmp_path):
    whole, wanted, _ = go(tmp_path / "whole", 5)
    t, summary, _ = go(tmp_path, 5, stop_in=3)
    assert summary is None
    assert t.seen[-3:] == ["eval 3", "save 3", "interrupted 3"]
    assert json.loads((t.run.path / "summary.json").read_text())["status"] == "interrupted"
    again, summary, notes = go(tmp_path, 5, resume=True)
    assert notes.begun == [(5, 4)]
    assert again.seen == ["step 4", "save 4", "step 5", "eval 5", "save 5", "done 5"]
    assert (again.weight, again.evals) == (whole.weight, whole.evals)
    assert {**summary, "run": ""} == {**wanted, "run": ""}


def test_a_signal_in_the_last_step_is_no_interruption(tmp_path):
    t, summary, _ = go(tmp_path, 2, stop_in=2)
    assert summary["status"] == "done"
    assert t.seen[-2:] == ["save 2", "done 2"]


def test_a_finished_run_is_not_stepped_nor_summarised_anew_and_a_longer_one_goes_on(tmp_path):
    _, wanted, _ = go(tmp_path, 2)
    again, summary, notes = go(tmp_path, 2, resume=True)
    assert again.seen == []
    assert (summary["steps"], summary["eval_after"]) == (2, wanted["eval_after"])
    assert notes.notes == ["the run is at step 2 of 2 already; nothing is left to do"]
    longer, summary, _ = go(tmp_path, 3, resume=True)
    assert longer.seen == ["step 3", "eval 3", "save 3", "done 3"]
    assert longer.weight == 6


def test_a_finished_run_whose_summary_was_lost_is_summarised(tmp_path):
    go(tmp_path, 2)
    (tmp_path / "r/summary.json").unlink()
    again, summary, _ = go(tmp_path, 2, resume=True)
    assert again.seen == ["done 2"]
    assert summary["steps"] == 2


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    go(tmp_path, 2)
    with pytest.raises(DataError, match="the training data changed"):
        go(tmp_path, 3, resume=True, tasks=(*TASKS, Task("c", "?")))


def test_every_method_brings_what_the_loop_asks_for():
    for kind in (Training, LinkTraining):
        assert {"restore", "save", "summarise"} <= vars(kind).keys()
        assert {"recipe", "options", "run", "tasks", "held_out", "evals"} <= vars(kind)["__dataclass_fields__"].keys()
