"""Trajectories as JSON objects, and back: what the run folder's `trajectories/*.jsonl` hold.

The inverse gives an equal value, with two limits of JSON: a not-finite log-probability comes back as NaN, and tuples
inside free `info` mappings come back as lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.errors import DataError
from agentrl.types import (
    Action,
    Completion,
    Embeddings,
    Grammar,
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


@dataclass(frozen=True, slots=True)
class TurnTraining:
    """What training made of one turn's completion. Every list has the length of the completion.

    `mask_reason[t]` is None exactly where `loss_mask[t]` holds. Raises `ValueError` when the two disagree.
    """

    old_logprobs: tuple[float | None, ...]
    loss_mask: tuple[bool, ...]
    mask_reason: tuple[MaskReason | None, ...]
    advantage: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.old_logprobs), len(self.loss_mask), len(self.mask_reason), len(self.advantage)}
        if len(lengths) != 1:
            raise ValueError(f"per-token lists of one turn have different lengths: {sorted(lengths)}")
        if any(kept == (reason is not None) for kept, reason in zip(self.loss_mask, self.mask_reason, strict=True)):
            raise ValueError("a token is trained exactly when it has no mask reason")


def trajectory_record(
    scored: ScoredTrajectory, per_turn: Sequence[TurnTraining | None], save_prompt_ids: bool = False
) -> dict[str, Any]:
    """The JSON object of one trajectory. A turn that was not trained has nulls in its training lists.

    `save_prompt_ids` adds each turn's whole prompt, without which the record cannot be turned back.
    """
    turns = scored.trajectory.turns
    if len(per_turn) != len(turns) or len(scored.action_scores) != len(turns):
        raise ValueError(f"{len(turns)} turns, {len(per_turn)} trainings, {len(scored.action_scores)} scores")
    record = _head(scored)
    record["turns"] = []
    for turn, score, training in zip(turns, scored.action_scores, per_turn, strict=True):
        item = _turn(turn, score) | _training(training, len(turn.action.completion.ids))
        if save_prompt_ids:
            item["prompt_ids"] = _plain_ids(turn)
        record["turns"].append(item)
    return record


def part_record(scored: ScoredTrajectory) -> dict[str, Any]:
    """The object that waits in a step's `.part.jsonl`: it can always be turned back, and knows no training yet.

    A context that grows append-only is stored once: `prompt_ids` then holds only what followed the prompt and
    completion of the earlier turn `prompt_base`.
    """
    record = _head(scored)
    record["turns"] = []
    turns = scored.trajectory.turns
    for place, (turn, score) in enumerate(zip(turns, scored.action_scores, strict=True)):
        item = _turn(turn, score)
        item["prompt_ids"] = _plain_ids(turn)
        base = next((i for i in range(place - 1, -1, -1) if turns[i].agent_index == turn.agent_index), None)
        if base is not None and item["prompt_ids"] is not None and _plain_ids(turns[base]) is not None:
            before = turns[base].action.request.prompt.ids + turns[base].action.completion.ids
            if turn.action.request.prompt.ids[: len(before)] == before:
                item["prompt_base"], item["prompt_ids"] = base, item["prompt_ids"][len(before) :]
        record["turns"].append(item)
    return record


def trajectory_from_record(record: Mapping[str, Any]) -> ScoredTrajectory:
    """The scored trajectory of a record. Raises `DataError` when it lacks prompt ids or another field."""
    try:
        turns: list[Turn] = []
        for item in record["turns"]:
            turns.append(_read_turn(item, turns))
        task = Task(
            id=record["task_id"],
            question=record["question"],
            references=tuple(record["references"]),
            files=tuple(record["files"]),
            info=record["task_info"],
        )
        trajectory = Trajectory(
            id=record["id"],
            task=task,
            g=record["g"],
            turns=tuple(turns),
            answer=record["answer"],
            status=record["status"],
            status_reason=record["status_reason"],
            counts=record["counts"],
        )
        outcome = Score(record["reward"], record["reward_reason"], record["reward_info"])
        scores = tuple(
            Score(item["score"], item["score_reason"], item["score_info"]) if item["scored"] else None
            for item in record["turns"]
        )
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"trajectory {record.get('id')!r} lacks what a rollout needs: {error}",
            "record rollouts with run.save_prompt_ids=true",
        ) from error
    return ScoredTrajectory(trajectory, outcome, scores)


def _head(scored: ScoredTrajectory) -> dict[str, Any]:
    trajectory, outcome = scored.trajectory, scored.outcome
    task = trajectory.task
    return {
        "id": trajectory.id,
        "task_id": task.id,
        "g": trajectory.g,
        "question": task.question,
        "reference": task.references[0] if task.references else None,
        "references": list(task.references),
        "answer": trajectory.answer,
        "reward": _number(outcome.value),
        "reward_missing_reason": outcome.reason if outcome.missing else None,
        "reward_reason": outcome.reason,
        "reward_info": dict(outcome.info),
        "status": trajectory.status,
        "status_reason": trajectory.status_reason,
        "counts": dict(trajectory.counts),
        "files": list(task.files),
        "task_info": dict(task.info),
    }


def _turn(turn: Turn, score: Score | None) -> dict[str, Any]:
    action, seen = turn.action, turn.observation
    completion, request = action.completion, action.request
    return {
        "agent": action.agent,
        "policy": request.policy,
        "policy_version": completion.policy_version,
        "turn": turn.turn,
        "agent_index": turn.agent_index,
        "call": turn.call,
        "bin": turn.bin,
        "parent": turn.parent,
        "text": action.text,
        "observation": seen.text if seen else None,
        "tool": seen.tool if seen else None,
        "purpose": seen.purpose if seen else None,
        "error": seen.error if seen else None,
        "items": seen.items if seen else 0,
        "truncated": seen.truncated_tokens if seen else 0,
        "observation_info": dict(seen.info) if seen else {},
        "scored": score is not None,
        "score": _number(score.value) if score else None,
        "score_reason": score.reason if score else None,
        "score_info": dict(score.info) if score else {},
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(request.prompt),
        "sampling": asdict(request.sampling),
        "key": asdict(request.key),
        "token_ids": list(completion.ids),
        "logprobs": [_number(x) for x in completion.logprobs],
        "constrained": list(completion.constrained),
        "forced": list(completion.forced),
    }


def _training(training: TurnTraining | None, length: int) -> dict[str, Any]:
    if training is None:
        return {name: [None] * length for name in ("old_logprobs", "loss_mask", "mask_reason", "advantage")}
    if len(training.loss_mask) != length:
        raise ValueError(f"training lists of {len(training.loss_mask)} tokens for a completion of {length}")
    return {
        "old_logprobs": [_number(x) for x in training.old_logprobs],
        "loss_mask": [bool(x) for x in training.loss_mask],
        "mask_reason": [None if x is None else x.value for x in training.mask_reason],
        "advantage": [_number(x) for x in training.advantage],
    }


def _read_turn(item: Mapping[str, Any], before: Sequence[Turn]) -> Turn:
    ids = tuple(item["token_ids"])
    prompt = tuple(item["prompt_ids"])
    if item.get("prompt_base") is not None:
        base = before[item["prompt_base"]].action
        prompt = base.request.prompt.ids + base.completion.ids + prompt
    sampling = dict(item["sampling"])
    if sampling["grammar"] is not None:
        sampling["grammar"] = Grammar(**sampling["grammar"])
    sampling["stop"], sampling["stop_token_ids"] = tuple(sampling["stop"]), tuple(sampling["stop_token_ids"])
    completion = Completion(
        ids=ids,
        logprobs=tuple(math.nan if x is None else x for x in item["logprobs"]),
        constrained=_read_flags(item["constrained"], len(ids)),
        forced=_read_flags(item["forced"], len(ids)),
        finish_reason=item["finish_reason"],
        policy_version=item["policy_version"],
    )
    request = Request(item["policy"], Prompt.of(prompt), Sampling(**sampling), Key(**item["key"]))
    observation = None
    if item["observation"] is not None:
        observation = Observation(
            text=item["observation"],
            tool=item["tool"],
            purpose=item["purpose"],
            error=item["error"],
            items=item["items"],
            truncated_tokens=item["truncated"],
            info=item["observation_info"],
        )
    return Turn(
        action=Action(item["agent"], request, completion, item["text"]),
        observation=observation,
        turn=item["turn"],
        agent_index=item["agent_index"],
        call=item["call"],
        bin=item["bin"],
        parent=item["parent"],
    )


def _plain_ids(turn: Turn) -> list[int] | None:
    prompt = turn.action.request.prompt
    return None if any(isinstance(s, Embeddings) for s in prompt.segments) else list(prompt.ids)


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _read_flags(flags: Sequence[bool], length: int) -> tuple[bool, ...]:
    if len(flags) != length:
        raise IndexError("per-token lists of different lengths")
    return tuple(flags)
