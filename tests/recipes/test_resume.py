"""A run that was killed and resumed is the run that was not, bit for bit (FIELD 51, 55, 56, 57)."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

TINY = ("model.name=tiny-llama", "model.dtype=float32", "launch.threads=1")
SHORT = ("data.eval.limit=2", "rollout.questions_per_step=2", "rollout.group_size=4", "reward=faults:faulty")
SETS = (*TINY, *SHORT, "engine.deterministic=true")
STEPS = 4
SMALL = ("data.eval.limit=2", "rollout.questions_per_step=1", "rollout.group_size=2", "reward=parity_reward:parity")
PARITY = (*TINY, *SMALL, "engine.deterministic=true")
ONE = ("mars", "train", "mars-embedded", "--smoke", "--name", "r")
# `FAULT` is point:step; the run kills itself there, as the system's out-of-memory killer would.
FAULTS = """
import os
import signal

import agentrl.run
from agentrl.recipes import loop
from agentrl.recipes.mars import train
from parity_reward import Parity

POINT, _, STEP = os.environ.get("FAULT", "").partition(":")
SCORED_BEFORE = 5


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(module, name, die_at):
    real = vars(module)[name]

    def instead(*args, **kwargs):
        if die_at(real, *args, **kwargs):
            die()
        return real(*args, **kwargs)

    setattr(module, name, instead)


class Faulty(Parity):
    scored = 0

    async def score(self, task, trajectory):
        if trajectory.id.startswith(f"train-{int(STEP or 0):06d}") and POINT == "rollout":
            self.scored += 1
            if self.scored > SCORED_BEFORE:
                die()
        return await super().score(task, trajectory)


def torn(real, policy, folder):
    if f"step_{int(STEP):06d}" not in str(folder):
        return False
    real(policy, folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return True


def faulty():
    if POINT == "update":
        before(train, "update_policies", lambda real, *args: args[-1] == int(STEP))
    if POINT == "sync":
        before(train, "_record", lambda real, t, step, *args: step == int(STEP))
    if POINT == "save":
        before(loop, "save_policy", torn)
    if POINT == "saved":
        before(agentrl.run, "_point", lambda real, link, name: name == f"step_{int(STEP):06d}")
    return Faulty()
"""


@pytest.fixture(autouse=True)
def _faults(folder: Path) -> None:
    (folder / "faults.py").write_text(FAULTS)


def train(drive: Any, name: str, fault: str = "", *args: str, sets: tuple[str, ...] = SETS, every: int = 2) -> Any:
    words = ("mars", "train", "mars-embedded", "--smoke", "--steps", str(STEPS), "--name", name, *args)
    return drive(*words, sets=(*sets, f"run.save_every={every}"), env={"FAULT": fault})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every step's metrics, but for what a clock measured."""
    clocked = ("time/", "tokens/s")
    return [{k: v for k, v in m.items() if not k.startswith(clocked)} for m in lines(run / "metrics.jsonl")]


def files(run: Path) -> dict[str, bytes]:
    """The bytes of every checkpoint, trajectory and evaluation."""
    found = [p for part in ("checkpoints", "trajectories", "evals") for p in sorted((run / part).rglob("*"))]
    return {str(p.relative_to(run)): p.read_bytes() for p in found if p.is_file()}


def test_a_run_killed_at_every_step_and_stage_equals_the_uninterrupted_one_bit_for_bit(drive, folder):
    whole = train(drive, "whole")
    assert whole.wait() == 0, whole.log
    faults = [f"{point}:{step}" for step in range(1, STEPS + 1) for point in ("rollout", "update")]
    faults[4:4] = ["sync:2", "save:2", "saved:2"]
    faults += ["save:4"]
    for number, fault in enumerate(faults):
        driver = train(drive, "killed", fault, *(["--resume"] if number else []))
        assert driver.wait() == -signal.SIGKILL, (fault, driver.log)
    driver = train(drive, "killed", "", "--resume")
    assert driver.wait() == 0, driver.log
    run, wanted = folder / "runs/killed", folder / "runs/whole"
    assert metrics(run) == metrics(wanted)
    assert files(run) == files(wanted)
    # the comparison means something: rewards differ, weights move, and each step sees questions of its own
    told = metrics(wanted)
    assert [m["policy_version"] for m in told] == [1, 2, 3, 4]
    assert all(m["grad_norm"] > 0 and m["rollouts/reused"] == 0 for m in told)
    asked = [{t["task_id"] for t in lines(p)} for p in sorted((wanted / "trajectories").iterdir())]
    assert len(asked) == STEPS
    assert len(set.union(*asked)) == 2 * STEPS
    before, after = json.loads((wanted / "summary.json").read_text()), json.loads((run / "summary.json").read_text())
    assert (before["attempts"], after["attempts"]) == (1, len(faults) + 1)
    assert after["eval_before"] == before["eval_before"]
    assert after["eval_after"] == before["eval_after"]


def test_outside_the_deterministic_mode_finished_trajectories_of_the_broken_step_are_reused(drive, folder):
    sets = (*TINY, *SHORT)
    assert train(drive, "r", "rollout:3", sets=sets).wait() == -signal.SIGKILL
    part = {t["id"]: t for t in lines(folder / "runs/r/trajectories/step_000003.part.jsonl")}
    assert len(part) == 5
    driver = train(drive, "r", "", "--resume", sets=sets)
    assert driver.wait() == 0, driver.log
    assert "resumed after step 2" in driver.log
    assert [m["rollouts/reused"] for m in metrics(folder / "runs/r")] == [0, 0, len(part), 0]
    step = {t["id"]: t for t in lines(folder / "runs/r/trajectories/step_000003.jsonl")}
    assert len(step) == 8
    for id_, kept in part.items():
        assert [t["token_ids"] for t in kept["turns"]] == [t["token_ids"] for t in step[id_]["turns"]]
        assert {t["policy_version"] for t in step[id_]["turns"]} == {2}


def test_the_resume_flag_goes_on_and_without_it_a_taken_name_is_refused(drive, folder):
    assert train(drive, "r", "update:4", every=1).wait() == -signal.SIGKILL
    again = train(drive, "r", every=1)
    assert again.wait() == 2
    assert "--resume" in again.log
    assert [m["step"] for m in metrics(folder / "runs/r")] == [1, 2, 3]
    driver = train(drive, "r", "", "--resume", every=1)
    assert driver.wait() == 0
    assert "step 4/4" in driver.log
    assert "step 3/4" not in driver.log
    assert [(m["step"], m["policy_version"]) for m in metrics(folder / "runs/r")] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_run_does_not_go_on_with_other_data(cli, folder):
    (folder / "own.jsonl").write_text("".join(f'{{"question": "q{i}", "answer": "a"}}\n' for i in range(2)))
    sets = (*PARITY, "data={path: own.jsonl}")
    assert cli(*ONE, "--steps", "1", sets=sets).code == 0
    (folder / "own.jsonl").write_text("".join(f'{{"question": "p{i}", "answer": "a"}}\n' for i in range(2)))
    done = cli(*ONE, "--steps", "2", "--resume", sets=sets)
    done.two_lines(4, "the training data changed since this run was saved")
    assert [m["step"] for m in metrics(folder / "runs/r")] == [1]


def test_a_resumed_run_keeps_what_makes_its_steps_comparable(cli, folder):
    assert cli(*ONE, "--steps", "1", sets=PARITY).code == 0
    run = folder / "runs/r"
    before = (run / "config.yaml").read_bytes(), (run / "summary.json").read_bytes(), files(run)
    for key, old, new in (
        ("reward", '"parity_reward:parity"', '"f1"'),
        ("data.limit", "null", "3"),
        ("run.seed", "0", "7"),
        ("run.eval_temperature", "0.0", "0.5"),
        ("algorithm.kl_coef", "0.0", "0.1"),
        ("mars.advantage_std", '"unbiased"', '"population"'),
        ("agents.system1.sampling.temperature", None, "0.3"),
        ("model.dtype", '"float32"', '"bfloat16"'),
        ("rollout.group_size", "2", "3"),
        ("tools.search.top_k", None, "4"),
    ):
        done = cli(*ONE, "--steps", "2", "--resume", sets=(*PARITY, f"{key}={new}"))
        done.two_lines(2, f"{key}: the run was started with {old or ''}", "start a new run with another --name")
        assert f"now it is {new}" in done.err
    assert ((run / "config.yaml").read_bytes(), (run / "summary.json").read_bytes(), files(run)) == before
    done = cli(*ONE, "--steps", "2", "--resume", sets=(*PARITY, "optim.lr=0.5", "rollout.max_concurrent=3"))
    assert done.code == 0, done
    noted = next(line for line in done.err.splitlines() if "resumed with another config" in line)
    assert "run.steps: 1 -> 2" in noted
    assert "-> 0.5" in noted
    assert "rollout.max_concurrent" in noted


def test_a_judge_may_be_reached_and_paid_otherwise_but_not_asked_otherwise():
    from agentrl.config.load import dump_yaml
    from agentrl.errors import ConfigError
    from agentrl.recipes.registry import Silence, load_recipe
    from agentrl.recipes.resuming import approve

    def recipe(*sets: str) -> Any:
        judge = "judge={model: m, base_url: 'http://127.0.0.1:1/v1'}"
        return load_recipe("mars-embedded", ("reward=judge", judge, *sets)).tree

    before = dump_yaml(recipe())
    free = ("judge.max_retries=9", "judge.base_url=http://127.0.0.1:2/v1", "judge.price.per_call=1", "judge.budget=5")
    approve(recipe(*free), Silence())(before, 1)
    with pytest.raises(ConfigError, match=r"judge\.model: the run was started with \"m\", now it is \"n\""):
        approve(recipe("judge.model=n"), Silence())(before, 1)


def test_a_finished_run_is_neither_cut_nor_summarised_anew(cli, folder):
    assert cli(*ONE, "--steps", "2", sets=PARITY).code == 0
    run = folder / "runs/r"
    summary = (run / "summary.json").read_bytes()
    done = cli(*ONE, "--steps", "1", "--resume", sets=PARITY)
    done.two_lines(2, "the run is already at step 2 of 1", "--steps 2 or more")
    assert (run / "summary.json").read_bytes() == summary
    done = cli(*ONE, "--steps", "2", "--resume", "--json", sets=PARITY)
    assert done.code == 0, done
    assert (run / "summary.json").read_bytes() == summary
    assert done.json == {"run": "runs/r", **json.loads(summary)}
    assert [m["step"] for m in metrics(run)] == [1, 2]


def test_a_run_whose_checkpoints_are_gone_starts_again_and_sets_the_old_steps_aside(cli, folder):
    assert cli(*ONE, "--steps", "1", sets=PARITY).code == 0
    run = folder / "runs/r"
    old = (run / "metrics.jsonl").read_bytes(), (run / "trajectories/step_000001.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    done = cli(*ONE, "--steps", "1", "--resume", sets=PARITY)
    assert done.code == 0, done
    assert "no whole checkpoint is left in runs/r/checkpoints: training starts again at step 1" in done.err
    assert "lies in runs/r/logs/before_attempt_2" in done.err
    aside = run / "logs/before_attempt_2"
    assert ((aside / "metrics.jsonl").read_bytes(), (aside / "step_000001.jsonl").read_bytes()) == old
    assert [m["step"] for m in metrics(run)] == [1]
