"""`agentrl inspect`: a run, one of its steps, or one trajectory down to its tokens; or two runs side by side."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentrl.cli import console
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.report.reader import RunView


def inspect(
    run: str,
    run_b: str | None = None,
    step: int | None = None,
    trajectory: str | None = None,
    agent: str | None = None,
    tokens: bool = False,
    html: str | None = None,
    plot: str | None = None,
    base: str = "runs",
) -> int:
    """Print what a run folder holds. Returns the exit code.

    Without a step or a trajectory: the summary, the metrics' course and the steps. `agent` and `tokens` show whole
    trajectories, of the last step where none is named. Raises `ConfigError` for a run, step, trajectory or agent that
    is not there.
    """
    from agentrl.report import terminal
    from agentrl.report.reader import open_run

    for option, value in (("--html", html), ("--plot", plot)):
        if value is not None:
            raise ConfigError(f"{option} {value}: this version has no {option[2:]} output", f"drop {option}")
    view = open_run(run, base)
    if run_b is not None:
        if step is not None or trajectory is not None or agent is not None or tokens:
            raise ConfigError("two runs are compared as wholes", "drop --step, --trajectory, --agent and --tokens")
        _out(terminal.render_comparison(view, open_run(run_b, base)))
    elif trajectory is not None:
        _show(_find(view, step, trajectory), agent, tokens)
    elif agent is not None or tokens:
        if step is None and not view.steps:
            raise ConfigError(f"run {view.name!r} has no trajectories", "wait for its first step")
        last = max(view.steps) if step is None else step
        _show([(last, record) for record in view.trajectories(last)], agent, tokens)
    elif step is not None:
        _out(terminal.render_trajectories(view.trajectories(step)))
    else:
        _out(terminal.render_summary(view))
        for part in (terminal.render_trend(view), terminal.render_steps(view)):
            _out(["", *part] if part else [])
    return 0


def _show(found: list[tuple[int, Mapping[str, Any]]], agent: str | None, tokens: bool) -> None:
    from agentrl.report import terminal

    agents = sorted({turn["agent"] for _, record in found for turn in record["turns"]})
    if agent is not None and agent not in agents:
        raise ConfigError(f"--agent {agent}: no turn by this agent", f"agents: {', '.join(agents) or 'none'}")
    for place, (step, record) in enumerate(found):
        _out([] if place == 0 else [""])
        _out([f"step {step}", *terminal.render_trajectory(record, agent=agent, tokens=tokens)])


def _find(view: RunView, step: int | None, trajectory: str) -> list[tuple[int, Mapping[str, Any]]]:
    known: list[str] = []
    found: list[tuple[int, Mapping[str, Any]]] = []
    for number in view.steps if step is None else (step,):
        for record in view.trajectories(number):
            known.append(record["id"])
            if record["id"] == trajectory:
                found.append((number, record))
    if not found:
        close = difflib.get_close_matches(trajectory, known, n=3) or known[:3]
        where = f"step {step} of " if step is not None else ""
        hint = f"trajectories: {', '.join(close)}" if close else "the run has none yet"
        raise ConfigError(f"--trajectory {trajectory}: not in {where}run {view.name!r}", hint)
    return found


def _out(lines: Iterable[str]) -> None:
    for line in lines:
        console.out(line)
