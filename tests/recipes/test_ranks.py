"""`launch.ranks`: from the command line, and however such a run ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.models import resolve

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")
SHORT = ("data.eval.limit=1", "rollout.questions_per_step=2", "rollout.group_size=4", "optim.lr=0.00001")
WORDS = ("mars", "train", "mars-embedded", "--smoke", "--steps", "2")
HELD = """
import asyncio
import pathlib

from parity_reward import Parity


class Held(Parity):
    async def score(self, task, trajectory):
        if trajectory.id.startswith("train-000001"):
            pathlib.Path("here").touch()
            while not pathlib.Path("go").exists():
                await asyncio.sleep(0.02)
        return await super().score(task, trajectory)
"""


def largest_gap(one: Path, other: Path) -> float:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[n] - second[n]).abs().max()) for n in first)


def test_m25_a_run_on_two_ranks_trains_as_one_on_one_rank(cli, folder):
    sets = (*TINY, *SHORT, "reward=parity_reward:parity", "algorithm.kl_coef=0.1")
    for name, ranks in (("one", 1), ("two", 2)):
        done = cli(*WORDS, "--name", name, "--json", sets=(*sets, f"launch.ranks={ranks}"))
        assert done.code == 0, done.err
        assert done.json["device"]["ranks"] == ranks
        assert done.json["policy_version"] == {"policy": 2}
    runs = folder / "runs"
    one, two = (runs / name / "checkpoints/latest/policies/policy" for name in ("one", "two"))
    assert largest_gap(one, two) < 1e-6
    assert largest_gap(one, resolve("tiny-llama")) > 1e-5
    metrics = [
        [json.loads(line) for line in (runs / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    ]
    for one, two in zip(*metrics, strict=True):
        assert one.keys() == two.keys()
        assert {"grad_norm", "loss"} <= {key for key, value in one.items() if value}
        for key, value in one.items():
            if not key.startswith(("time/", "pack/", "tokens/computed")):
                assert two[key] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), key


@pytest.fixture
def start(drive: Callable[..., Any], folder: Path) -> Callable[[], Any]:
    """A run on two ranks that waits in its first step for the file `go`."""
    (folder / "held.py").write_text(HELD)

    def run() -> Any:
        sets = (*TINY, *SHORT, "reward=held:Held", "launch.ranks=2")
        driver = drive(*WORDS, "--name", "r", sets=sets)
        driver.wait_for("here")
        return driver

    return run


def worker_of(driver: Any, processes: Any) -> int:
    (pid,) = (pid for pid, command in processes.below(driver.pid).items() if "spawn_main" in command)
    return pid


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_is_named(start, processes, folder):
    driver = start()
    worker = worker_of(driver, processes)
    os.kill(worker, signal.SIGKILL)
    (folder / "go").touch()
    assert driver.wait(15) == 1, driver.log
    assert "error: trainer rank 1 of 2 ended: killed by SIGKILL" in driver.log
    assert "Traceback" not in driver.log
    assert driver.left() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGKILL], -signal.SIGKILL), ([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 130)],
)
def test_no_rank_outlives_its_run(start, processes, numbers, code):
    driver = start()
    worker = worker_of(driver, processes)
    for number in numbers:
        driver.signal(number)
        time.sleep(0.05)
    assert driver.wait(12) == code, driver.log
    assert driver.left([worker]) == {}


@pytest.mark.slow
def test_ctrl_c_of_a_terminal_reaches_all_processes_and_the_step_is_finished_on_all_ranks(start, processes, folder):
    driver = start()
    for pid in (worker_of(driver, processes), driver.pid):
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    (folder / "go").touch()
    assert driver.wait(30) == 130, driver.log
    assert json.loads((folder / "runs/r/metrics.jsonl").read_text())["policy_version"] == 1
    assert driver.left() == {}


def test_more_ranks_than_the_machine_has_use_for_are_refused(cli):
    done = cli(*WORDS, sets=(*TINY, "launch.ranks=500"))
    done.two_lines(2, "launch.ranks is 500", "set launch.ranks to at most ")
