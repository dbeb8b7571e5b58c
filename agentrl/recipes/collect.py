"""Roll out, score each trajectory as it ends, and keep it at once; and what a step's trajectories add up to."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from agentrl.errors import RunFailedError
from agentrl.protocols import Reward
from agentrl.recipes.registry import Progress
from agentrl.recipes.session import Session
from agentrl.records import part_record
from agentrl.rollout.runner import Job, Workflow, run_jobs
from agentrl.run import StepWriter
from agentrl.types import Group, Score, ScoredTrajectory, Task, Trajectory

ActionScores = Callable[[Trajectory], Awaitable[tuple[Score | None, ...]]]
"""One score, or none, per turn of a finished trajectory."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Scored trajectories in job order, and the seconds that rolling out and grading took."""

    scored: tuple[ScoredTrajectory, ...]
    rollout_s: float
    grade_s: float
    reused: int = 0

    @property
    def groups(self) -> tuple[Group, ...]:
        tasks: dict[str, list[ScoredTrajectory]] = {}
        for scored in self.scored:
            tasks.setdefault(scored.trajectory.task.id, []).append(scored)
        return tuple(Group(members[0].trajectory.task, tuple(members)) for members in tasks.values())


def jobs_for(tasks: Sequence[Task], group_size: int, phase: str, step: int) -> list[Job]:
    """`group_size` rollouts of every task, in the order of the tasks."""
    return [Job(task, g, phase, step) for task in tasks for g in range(group_size)]


async def collect(
    session: Session,
    jobs: Sequence[Job],
    workflow: Workflow,
    reward: Reward,
    *,
    max_concurrent: int,
    writer: StepWriter | None = None,
    done: Mapping[str, ScoredTrajectory] | None = None,
    progress: Progress | None = None,
    label: str = "rollout",
    score_actions: ActionScores | None = None,
) -> Collected:
    """Run the jobs and score their trajectories; scoring runs beside the other rollouts.

    Each scored trajectory is written to `writer` at once. `done` holds finished ones of a broken step, by id, which
    are not run again. A failed rollout has a missing score that says so. Without `score_actions` no action has one.
    """
    finished = dict(done or {})
    todo = [job for job in jobs if job.trajectory_id not in finished]
    grading: dict[str, asyncio.Task[ScoredTrajectory]] = {}
    busy = 0.0

    async def grade(trajectory: Trajectory) -> ScoredTrajectory:
        nonlocal busy
        started = time.monotonic()
        outcome = await _score(reward, trajectory)
        actions = (None,) * len(trajectory.turns) if score_actions is None else await score_actions(trajectory)
        scored = ScoredTrajectory(trajectory, outcome, actions)
        busy += time.monotonic() - started
        if writer is not None:
            writer.add(part_record(scored))
        return scored

    def ended(trajectory: Trajectory) -> None:
        grading[trajectory.id] = asyncio.create_task(grade(trajectory))
        if progress is not None:
            progress.phase(label, len(grading), len(todo))

    started = time.monotonic()
    try:
        await run_jobs(
            todo,
            workflow,
            engine=session.engine,
            gate=session.gate,
            tools=session.tools,
            max_concurrent=max_concurrent,
            on_trajectory=ended,
        )
        rollout_s = time.monotonic() - started
        for key, task in grading.items():
            finished[key] = await task
    finally:
        for task in grading.values():
            task.cancel()
        await asyncio.gather(*grading.values(), return_exceptions=True)
    return Collected(tuple(finished[j.trajectory_id] for j in jobs), rollout_s, busy, len(jobs) - len(todo))


async def _score(reward: Reward, trajectory: Trajectory) -> Score:
    """The outcome score. A grader that raises gives a missing score with its reason, never a number."""
    if trajectory.status == "failed":
        return Score(None, f"rollout failed: {trajectory.status_reason}")
    try:
        score = await reward.score(trajectory.task, trajectory)
    except Exception as error:  # noqa: BLE001 - a grader's fault is a missing score, counted and alarmed
        return Score(None, f"{type(error).__name__}: {error}")
    if not isinstance(score, Score):
        return Score(None, f"returned {type(score).__name__}, not Score")
    value: object = score.value  # a user's reward may hold anything
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
        return Score(None, f"the reward is {value!r}, not a number", score.info)
    return score


def refuse_ungraded(step: int, key: str, scored: Sequence[ScoredTrajectory], *, actions: bool = False) -> None:
    """Raises `RunFailedError` with the first reason where no trajectory (`actions`: no action) has a score: the grader
    named by `key` is broken, and further steps would train nothing. Failed rollouts have none by rule and are no such
    sign.
    """
    pairs = [(one, score) for one in scored for score in (one.action_scores if actions else (one.outcome,)) if score]
    reasons = [score.reason for one, score in pairs if one.trajectory.status != "failed"]
    if reasons and all(score.missing for _, score in pairs):
        raise RunFailedError(
            f"{key}: every reward of step {step} is missing: {reasons[0] or 'no reason given'}",
            f"repair {key}, then go on with --resume; `agentrl inspect RUN --step {step}` shows every reason",
        )


def rollout_metrics(collected: Collected) -> dict[str, float | None]:
    """Rewards, failures, token counts and the workflow's own counters over a step's trajectories."""
    scored = collected.scored
    rewards = [s.outcome.value for s in scored if s.outcome.value is not None]
    failed = sum(s.trajectory.status == "failed" for s in scored)
    costs = asking_costs("judge", (s.outcome.info for s in scored))
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else None,
        "reward/std": statistics.pstdev(rewards) if rewards else None,
        "reward/missing": len(scored) - len(rewards),
        "rollouts/ok": len(scored) - failed,
        "rollouts/failed": failed,
        "rollouts/reused": collected.reused,
        "tokens/generated": sum(len(t.action.completion.ids) for s in scored for t in s.trajectory.turns),
        "time/rollout": collected.rollout_s,
        "time/grade": collected.grade_s,
        **costs,
    }


def asking_costs(kind: str, infos: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What asking a model for scores took, summed over them, by `kind/`; nothing where no model was asked. A recording
    of an earlier version lacks some of the counts."""
    asked = [info for info in infos if "cost_usd" in info]
    counts = ("calls", "retries", "unreadable", "cost_usd")
    return {f"{kind}/{key}": sum(info.get(key, 0) for info in asked) for key in counts if asked}


def total_counts(scored: Sequence[ScoredTrajectory]) -> Counter[str]:
    """The workflow's counters, summed."""
    counts: Counter[str] = Counter()
    for one in scored:
        counts.update(one.trajectory.counts)
    return counts
