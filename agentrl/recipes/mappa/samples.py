"""Scored trajectories -> samples, with the actions masked that may not be trained (M-05, M-16, M-24, M-26).

One context is one sample, token for token as its agent lived it (M-17); the actions in it are its spans. What masks
an action masks no other: a missing score, a completion cut at its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.recipes.mappa.config import MappaConfig
from agentrl.recipes.mappa.returns import action_rewards
from agentrl.types import MaskReason, Sample, Score, ScoredTrajectory, Span
from agentrl.update.samples import to_samples


@dataclass(frozen=True, slots=True)
class TeamSamples:
    """The samples of a step, and per trajectory the reward of each turn's action (None where it is missing)."""

    samples: tuple[Sample, ...]
    rewards: dict[str, tuple[float | None, ...]]


def team_samples(
    scored: Sequence[ScoredTrajectory],
    mappa: MappaConfig,
    *,
    frozen: Callable[[str], bool],
    constrained: str,
) -> TeamSamples:
    """Samples of all agents. `frozen(agent)` tells whose tokens carry no loss; `constrained` is as in the algorithm.

    A failed trajectory keeps the actions that were completed and scored. The part label is the agent.
    """
    samples: list[Sample] = []
    rewards: dict[str, tuple[float | None, ...]] = {}
    for one in scored:
        trajectory = one.trajectory
        mine = rewards[trajectory.id] = action_rewards(one, mappa)
        # Here a mask follows from an action's own reward, so the trajectory's fate and outcome mask nothing.
        whole = ScoredTrajectory(replace(trajectory, status="ok"), Score(0.0), one.action_scores)
        made = to_samples(
            whole,
            part_of=str,
            fate_of=lambda agent: MaskReason.FROZEN if frozen(agent) else None,
            constrained=constrained,
        )
        samples += [replace(_masked(s, one, mine, mappa), score=one.outcome) for s in made]
    return TeamSamples(tuple(samples), rewards)


def _masked(sample: Sample, scored: ScoredTrajectory, rewards: Sequence[float | None], mappa: MappaConfig) -> Sample:
    reasons = list(sample.reasons)
    for span in sample.spans:
        reason = _reason(span, scored, rewards, mappa)
        if reason is not None:
            for t in range(span.start, span.stop):
                reasons[t] = reasons[t] or reason
    return replace(sample, reasons=tuple(reasons))


def _reason(
    span: Span, scored: ScoredTrajectory, rewards: Sequence[float | None], mappa: MappaConfig
) -> MaskReason | None:
    if rewards[span.turn_index] is None:
        return MaskReason.REWARD_MISSING
    cut = scored.trajectory.turns[span.turn_index].action.completion.finish_reason == "length"
    return MaskReason.TRUNCATED if cut and mappa.mask_truncated else None
