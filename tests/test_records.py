"""Trajectories become JSON objects with the fields of the contract, and come back equal."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from agentrl.errors import DataError
from agentrl.files import encode
from agentrl.records import TurnTraining, part_record, trajectory_from_record, trajectory_record
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

TOP = "id task_id question reference answer reward reward_missing_reason status status_reason turns"
TURN = (
    "agent policy policy_version token_ids logprobs old_logprobs loss_mask mask_reason advantage text observation "
    "score score_reason tool purpose finish_reason turn parent call bin items truncated prompt_tokens"
)


def _turn(agent: str, index: int, prompt: tuple[int, ...], ids: tuple[int, ...], turn: int, **more: object) -> Turn:
    completion = Completion(
        ids=ids,
        logprobs=tuple(-0.1 * i for i in range(len(ids))),
        constrained=tuple(i % 2 == 0 for i in range(len(ids))),
        forced=tuple(i == 1 for i in range(len(ids))),
        finish_reason="stop",
        policy_version=3,
    )
    sampling = Sampling(temperature=0.7, stop=("</s>",), stop_token_ids=(2,), grammar=Grammar("regex", "a+"))
    request = Request("policy", Prompt.of(prompt), sampling, Key("train", 4, "q1", 1, turn, index))
    seen = Observation("seen\x1b", "search", "why", None, 3, 9, {"bins": [1, 2]}) if index == 0 else None
    return Turn(Action(agent, request, completion, "text\u2028"), seen, turn, index, **more)  # type: ignore[arg-type]


def _scored() -> ScoredTrajectory:
    first = _turn("system2", 0, (1, 2, 3), (4, 5), 0)
    second = _turn("system1", 1, (9, 9), (7, 8, 9), 0, call=1, bin=2, parent=0)
    third = _turn("system2", 0, (1, 2, 3, 4, 5, 60, 61), (6,), 1)
    task = Task("q1", "who?", ("Ann", "Anne"), ("f.csv",), {"type": "bridge", "titles": ["a"]})
    trajectory = Trajectory("q1/1", task, 1, (first, second, third), "Ann", "ok", None, {"tool_calls": 1})
    return ScoredTrajectory(trajectory, Score(1.0, "match", {"f1": 1.0}), (None, Score(None, "coach down"), Score(0.5)))


def _training(length: int) -> TurnTraining:
    reasons = (MaskReason.FORCED,) + (None,) * (length - 1)
    return TurnTraining((math.nan,) * length, tuple(r is None for r in reasons), reasons, (0.5,) * length)


def test_a_record_has_every_field_of_the_contract_and_lists_of_the_completions_length() -> None:
    record = trajectory_record(_scored(), [_training(2), None, _training(1)])
    assert set(TOP.split()) <= set(record)
    for turn in record["turns"]:
        assert set(TURN.split()) <= set(turn)
        assert "prompt_ids" not in turn
        for name in ("logprobs", "old_logprobs", "loss_mask", "mask_reason", "advantage"):
            assert len(turn[name]) == len(turn["token_ids"])
    assert record["turns"][0]["mask_reason"] == ["forced", None]
    assert record["turns"][0]["loss_mask"] == [False, True]
    assert record["turns"][0]["old_logprobs"] == [None, None]
    assert record["turns"][1]["parent"] == 0
    assert record["turns"][2]["prompt_tokens"] == 7
    assert record["reference"] == "Ann"
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("kind", ["part", "full"])
def test_a_record_comes_back_equal_through_json(kind: str) -> None:
    scored = _scored()
    record = part_record(scored) if kind == "part" else trajectory_record(scored, [None] * 3, save_prompt_ids=True)
    assert trajectory_from_record(json.loads(encode(record))) == scored


def test_a_growing_context_is_stored_once_in_the_part() -> None:
    turns = part_record(_scored())["turns"]
    assert [t["prompt_ids"] for t in turns] == [[1, 2, 3], [9, 9], [60, 61]]
    assert turns[2]["prompt_base"] == 0
    assert [t["prompt_ids"] for t in trajectory_record(_scored(), [None] * 3, save_prompt_ids=True)["turns"]] == [
        [1, 2, 3],
        [9, 9],
        [1, 2, 3, 4, 5, 60, 61],
    ]


def test_a_rerendered_context_is_stored_whole() -> None:
    scored = _scored()
    third = _turn("system2", 0, (1, 2, 3, 4, 50, 60), (6,), 1)
    turns = (*scored.trajectory.turns[:2], third)
    changed = replace(scored, trajectory=replace(scored.trajectory, turns=turns))
    record = part_record(changed)
    assert record["turns"][2]["prompt_ids"] == [1, 2, 3, 4, 50, 60]
    assert trajectory_from_record(record) == changed


def test_missing_scores_stay_missing_and_are_not_zero() -> None:
    scored = replace(_scored(), outcome=Score(None, "judge down"))
    record = trajectory_record(scored, [None] * 3, True)
    assert record["reward"] is None
    assert record["reward_missing_reason"] == "judge down"
    assert record["turns"][1]["score"] is None
    assert record["turns"][1]["score_reason"] == "coach down"
    back = trajectory_from_record(record)
    assert back.outcome.missing
    assert back.action_scores[0] is None
    assert back.action_scores[1] == Score(None, "coach down")
    assert trajectory_record(_scored(), [None] * 3)["reward_missing_reason"] is None


def test_a_not_finite_logprob_is_null_and_comes_back_as_nan() -> None:
    scored = _scored()
    first = scored.trajectory.turns[0]
    completion = replace(first.action.completion, logprobs=(-math.inf, -1.0))
    turn = replace(first, action=replace(first.action, completion=completion))
    changed = replace(scored, trajectory=replace(scored.trajectory, turns=(turn, *scored.trajectory.turns[1:])))
    record = part_record(changed)
    assert record["turns"][0]["logprobs"] == [None, -1.0]
    assert math.isnan(trajectory_from_record(record).trajectory.turns[0].action.completion.logprobs[0])


def test_a_record_without_prompt_ids_is_refused_with_the_switch_to_set() -> None:
    with pytest.raises(DataError, match="prompt_ids") as caught:
        trajectory_from_record(trajectory_record(_scored(), [None] * 3))
    assert "save_prompt_ids" in caught.value.fix


def test_a_prompt_with_embeddings_is_recorded_by_its_length() -> None:
    scored = _scored()
    first = scored.trajectory.turns[0]
    request = replace(first.action.request, prompt=Prompt(((1, 2), Embeddings(object(), 4, 8))))
    turn = replace(first, action=replace(first.action, request=request))
    changed = replace(scored, trajectory=replace(scored.trajectory, turns=(turn, *scored.trajectory.turns[1:])))
    record = trajectory_record(changed, [None] * 3, save_prompt_ids=True)
    assert record["turns"][0]["prompt_tokens"] == 6
    assert record["turns"][0]["prompt_ids"] is None
    with pytest.raises(DataError):
        trajectory_from_record(part_record(changed))


def test_training_lists_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="completion of 2"):
        trajectory_record(_scored(), [_training(3), None, None])
    with pytest.raises(ValueError, match="2 trainings"):
        trajectory_record(_scored(), [None, None])
    with pytest.raises(ValueError, match="different lengths"):
        TurnTraining((0.0,), (True, True), (None, None), (0.0, 0.0))
    with pytest.raises(ValueError, match="no mask reason"):
        TurnTraining((0.0,), (True,), (MaskReason.WORLD,), (0.0,))
