"""A run on the terminal: what it came to, one trajectory down to its tokens, and no control characters ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli.inspect import inspect
from agentrl.errors import ConfigError, DataError
from agentrl.grading.interval import eval_block, paired_rise
from agentrl.records import TurnTraining, part_record, trajectory_record
from agentrl.report.reader import open_run
from agentrl.report.terminal import clean, render_trajectory
from agentrl.run import Run
from agentrl.types import (
    Action,
    Completion,
    Key,
    MaskReason,
    Observation,
    Prompt,
    Request,
    Sampling,
    Score,
    ScoredTrajectory,
    Task,
    Trajectory,
    Turn,
)

EVIL = "\x1b[2J\x1b]0;owned\x07 red\x9b31m \u202eevil\r\nnext\x00line\x08"


def _turn(agent: str, index: int, turn: int, text: str, seen: Observation | None = None, **more: int) -> Turn:
    completion = Completion((11, 12), (-0.5, -1.25), (False,) * 2, (False,) * 2, "stop", 7)
    request = Request("policy", Prompt.of((1, 2, 3)), Sampling(), Key("train", 1, "q", 0, turn, index))
    return Turn(Action(agent, request, completion, text), seen, turn, index, **more)


def _scored(name: str = "q/0", reward: float | None = 1.0) -> ScoredTrajectory:
    found = Observation("digest\nof two", "search", "find the year", None, 3, 40)
    turns = (
        _turn("system2", 1, 0, "call it\n" + EVIL, found),
        _turn("system1", 0, 0, "digest", call=0, bin=0, parent=0),
        _turn("system1", 0, 0, "of two", call=0, bin=1, parent=0),
        _turn("system2", 1, 1, "1912"),
    )
    task = Task("q", "When? " + EVIL, ("1912",))
    outcome = Score(reward, "judged right" if reward is not None else "judge down")
    scores = (Score(0.25, "good call"), None, Score(None, "coach down"), None)
    return ScoredTrajectory(Trajectory(name, task, 0, turns, "1912", "ok"), outcome, scores)


TRAINING = TurnTraining((-0.5, -1.5), (True, False), (None, MaskReason.FORCED), (0.75, 0.0))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name, reward in (("one", 1.0), ("two", 0.0)):
        with Run.create(tmp_path, name, "method: mars\n", seed=3) as run:
            for step in (1, 2):
                record = trajectory_record(_scored(f"q/{step}", reward), [TRAINING, None, None, TRAINING])
                run.open_step(step).commit([record])
                run.log_metrics({"step": step, "reward/mean": reward * step, "loss": 0.5 / step, "reward/missing": 0})
                with run.checkpoint(step):
                    pass
            run.open_step(3).add(part_record(_scored("q/3", None)))
            before, after = {"a": 0.0, "b": 0.0, "c": None}, {"a": reward, "b": reward, "c": 1.0}
            run.write_summary(
                {
                    "eval_before": eval_block(before),
                    "eval_after": eval_block(after),
                    "rise": paired_rise(before, after),
                }
            )
    return tmp_path


def _shown(base: Path, capsys: pytest.CaptureFixture[str], run: str = "one", **options: object) -> str:
    assert inspect(run, base=str(base), **options) == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert not [c for c in out if c < " " and c != "\n"]
    assert not set("\x7f\x9b\u202e") & set(out)
    return out


def test_a_run_shows_its_evaluations_rise_trend_and_steps(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _shown(base, capsys)
    assert "eval_before: 0.000 (95%: 0.000 to 0.658), 0 of 2, 1 missing" in out
    assert "eval_after: 1.000" in out
    assert "rise: +1.000 (95%: +1.000 to +1.000)" in out
    assert "checkpoints: 1, 2" in out
    assert "seed: 3" in out
    assert "▁█" in out
    (line,) = (x for x in out.splitlines() if x.startswith("3 (unfinished)"))
    assert line.split()[2:] == ["-", "1", "1", "0", "8"]
    assert _shown(base, capsys, run=str(base / "one")) == out


def test_a_step_lists_its_trajectories(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "q/2" in _shown(base, capsys, step=2)
    assert "missing: judge down" in _shown(base, capsys, step=3)


def test_a_trajectory_shows_its_turns_with_called_agents_indented(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _shown(base, capsys, trajectory="q/1").splitlines()
    heads = [line for line in lines if "[turn" in line]
    assert [head.split("]")[1].split()[0] for head in heads] == ["system2", "system1", "system1", "system2"]
    assert [len(head) - len(head.lstrip()) for head in heads] == [0, 4, 4, 0]
    assert "policy v7  3 + 2 tokens  stop  score 0.25" in heads[0]
    assert "call 0 bin 1" in heads[2]
    assert "score missing" in heads[2]
    for part in ("reason: good call", "reason: coach down", "tool: search", "purpose: find the year"):
        assert any(part in line for line in lines)
    assert "  > digest" in lines
    assert "  > of two" in lines
    assert "  observed 3 items, 40 tokens cut" in lines
    assert "reward: 1  judged right" in lines


def test_tokens_show_agent_version_logprobs_advantage_and_mask(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in _shown(base, capsys, trajectory="q/1", tokens=True).splitlines()]
    assert ["0", "11", "system2", "7", "-0.5000", "-0.5000", "+0.750", "trained"] in rows
    assert ["1", "12", "system2", "7", "-1.2500", "-1.5000", "+0.000", "forced"] in rows
    assert ["1", "12", "system1", "7", "-1.2500", "-", "-", "-"] in rows
    assert sum(row[:1] == ["0"] for row in rows) == 4
    assert "behaviour (T=1)  old (sampling T)" in _shown(base, capsys, trajectory="q/1", tokens=True)
    unfinished = _shown(base, capsys, step=3, tokens=True)
    assert unfinished.count("token id") == 4


def test_filters_take_the_last_step_where_none_is_named(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _shown(base, capsys, agent="system1")
    assert out.startswith("step 3\n")
    assert out.count("[turn") == 2
    assert "] system2" not in out


def test_two_runs_are_compared_with_a_paired_interval(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _shown(base, capsys, run_b="two")
    assert "two over one, 3 common items: -0.667" in out
    assert any(line.split() == ["reward/mean", "2", "0"] for line in out.splitlines())


@pytest.mark.parametrize(
    ("options", "cause", "fix"),
    [
        ({"run": "onne"}, "no run", "one"),
        ({"step": 9}, "--step 9", "1 to 3"),
        ({"trajectory": "q/11"}, "--trajectory q/11", "q/1"),
        ({"trajectory": "q/1", "step": 2}, "not in step 2", "q/2"),
        ({"agent": "system3"}, "--agent system3", "system1, system2"),
        ({"html": "x.html"}, "--html x.html", "drop --html"),
        ({"plot": "x.png"}, "--plot x.png", "drop --plot"),
        ({"run_b": "two", "tokens": True}, "as wholes", "--tokens"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    base: Path, options: dict[str, object], cause: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        inspect(**{"run": "one", "base": str(base), **options})  # type: ignore[arg-type]
    assert cause in caught.value.cause
    assert fix in caught.value.fix


def test_a_run_that_has_just_begun_or_was_torn_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run.create(tmp_path, "new", "method: mars\n") as run:
        assert "no summary yet" in _shown(tmp_path, capsys, run="new")
        run.log_metrics({"step": 1, "loss": float("nan")})
        with run.metrics_path.open("a") as file:
            file.write('{"step": 2, "lo')
        assert [m["step"] for m in open_run(run.path).metrics] == [1]
        _shown(tmp_path, capsys, run="new")
        run.metrics_path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl: broken"):
            open_run(run.path)


def test_every_control_character_is_made_visible() -> None:
    shown = clean("".join(map(chr, range(0x20))) + "\x7f\x80\x9f\u200f\u2028\u202e\u2066ok é 北")
    assert shown.isprintable()
    assert "\\x1b" in shown
    assert "\\u202e" in shown
    assert shown.endswith("ok é 北")


def test_a_hostile_record_cannot_start_a_line_of_its_own() -> None:
    record = json.loads(json.dumps(trajectory_record(_scored(), [None] * 4)))
    record |= {"id": "x\n[turn 9] forged", "status_reason": "a\nreward: 1", "reward_reason": "b\n[turn 8] forged"}
    lines = render_trajectory(record)
    assert not [line for line in lines if line.startswith(("[turn 9]", "[turn 8]", "reward: 1\n"))]
    assert all("\n" not in line for line in lines)
