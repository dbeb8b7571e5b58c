"""What training made of each turn, for the trajectory records: read back from the credited samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.records import TurnTraining, trajectory_record
from agentrl.types import CreditedSample, ScoredTrajectory


def step_records(
    scored: Sequence[ScoredTrajectory],
    credited: Sequence[CreditedSample],
    old: Sequence[Mapping[int, float]],
    *,
    save_prompt_ids: bool = False,
) -> list[dict[str, Any]]:
    """The JSON objects of a step. `old` holds, per sample and token, the trainer's log-probability; a sample that
    could not move the weights may have none, and its tokens then have null."""
    training: dict[tuple[str, int], TurnTraining] = {}
    for sample, values in zip(credited, old, strict=True):
        for span in sample.sample.spans:
            tokens = range(span.start, span.stop)
            reasons = tuple(sample.sample.reasons[t] for t in tokens)
            training[sample.sample.trajectory_id, span.turn_index] = TurnTraining(
                old_logprobs=tuple(values.get(t) for t in tokens),
                loss_mask=tuple(reason is None for reason in reasons),
                mask_reason=reasons,
                advantage=tuple(sample.advantages[t] for t in tokens),
            )
    return [
        trajectory_record(
            one, [training.get((one.trajectory.id, i)) for i in range(len(one.trajectory.turns))], save_prompt_ids
        )
        for one in scored
    ]


def untrained_records(scored: Sequence[ScoredTrajectory], *, save_prompt_ids: bool = False) -> list[dict[str, Any]]:
    """The JSON objects of rollouts that nothing is trained on."""
    return [trajectory_record(one, [None] * len(one.trajectory.turns), save_prompt_ids) for one in scored]
