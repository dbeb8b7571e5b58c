"""MAPPA's credit: the worked example, one normalisation, masks, degenerate batches, baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.algo.loss import clipped_surrogate
from agentrl.recipes.mappa.config import MappaConfig
from agentrl.recipes.mappa.credit import Credit, assign, token_weights
from agentrl.recipes.mappa.returns import action_rewards
from agentrl.recipes.mappa.samples import team_samples
from agentrl.types import (
    Action,
    Completion,
    Key,
    MaskReason,
    Prompt,
    Request,
    Sampling,
    Score,
    ScoredSample,
    ScoredTrajectory,
    Task,
    Trajectory,
    Turn,
)

DEFAULT = MappaConfig()


def _turn(
    agent: str, prompt: Sequence[int], ids: Sequence[int], turn: int, finish: Any = "stop", policy: str | None = None
) -> Turn:
    request = Request(policy or agent, Prompt.of(tuple(prompt)), Sampling(), Key("train", 1, "t", 0, turn, 0))
    n = len(ids)
    done = Completion(tuple(ids), (-1.0,) * n, (False,) * n, (False,) * n, finish, 0)
    return Turn(Action(agent, request, done, "text"), None, turn, 0)


def _trajectory(
    name: str, turns: Sequence[Turn], scores: Sequence[float | None], outcome: float | None = None, status: Any = "ok"
) -> ScoredTrajectory:
    task = Task(name.split("/")[0], "q")
    trajectory = Trajectory(name, task, 0, tuple(turns), None, status, "broke" if status == "failed" else None)
    given = tuple(Score(s) if s is not None else Score(None, "coach failed") for s in scores)
    return ScoredTrajectory(trajectory, Score(outcome, None if outcome is not None else "none"), given)


def _one(name: str, score: float | None, length: int, agent: str = "a", finish: Any = "stop") -> ScoredTrajectory:
    return _trajectory(name, [_turn(agent, (1, 2), range(10, 10 + length), 0, finish)], [score])


def _samples(scored: Sequence[ScoredTrajectory], mappa: MappaConfig = DEFAULT, frozen: Sequence[str] = ()) -> Any:
    return team_samples(scored, mappa, frozen=lambda agent: agent in frozen, constrained="allowed")


def _with_kl(samples: Sequence[Any], kls: Sequence[Sequence[float]] | None = None) -> list[ScoredSample]:
    """Old and reference log-probabilities whose difference at the trained tokens is `kls`, NaN elsewhere."""
    out = []
    for i, sample in enumerate(samples):
        given = iter(kls[i] if kls is not None else [0.0] * sample.num_trained)
        ratio = [next(given) if t else math.nan for t in sample.loss_mask]
        old = tuple(-1.0 if t else math.nan for t in sample.loss_mask)
        out.append(ScoredSample(sample, old, tuple(o - k for o, k in zip(old, ratio, strict=True))))
    return out


def _assign(scored: Sequence[ScoredTrajectory], mappa: MappaConfig = DEFAULT, kls: Any = None, **more: Any) -> Credit:
    made = _samples(scored, mappa)
    names = sorted({s.policy for s in made.samples})
    keys = {"groups": names} | more
    return assign(_with_kl(made.samples, kls), made.rewards, mappa, **keys)


def _trained(credit: Credit) -> list[list[float]]:
    return [[a for a, t in zip(c.advantages, c.sample.loss_mask, strict=True) if t] for c in credit.credited]


WORKED = [_one("t/0", 8.0, 3), _one("u/0", 3.0, 2)]
KLS = [[0.1, -0.2, 0.3], [0.0, 0.5]]
ADVANTAGES = [[0.8165, 0.8206, 0.8124], [-1.2247, -1.2247]]


def test_m12_the_worked_example() -> None:
    credit = _assign(WORKED, kls=KLS)
    for got, expected in zip(_trained(credit), ADVANTAGES, strict=True):
        assert got == pytest.approx(expected, abs=1e-4)
    flat = torch.tensor([a for row in _trained(credit) for a in row])
    assert abs(float(flat.mean())) < 1e-6
    assert float(flat.var(unbiased=False)) == pytest.approx(1.0, abs=1e-6)


def test_m10_returns_are_undiscounted_over_the_tokens_of_one_action() -> None:
    # Without whitening A = (G - mu) / sd; the differences of G inside one action are those of the remaining KL.
    credit = _assign(WORKED, kls=KLS)
    (a1, a2, a3), (b1, b2) = _trained(credit)
    sd = math.sqrt(0.0607225600)
    returns = [0.798, 0.799, 0.797, 0.295, 0.295]
    for a, g in zip((a1, a2, a3, b1, b2), returns, strict=True):
        assert a * sd + 0.5968 == pytest.approx(g, abs=1e-9)


def test_m09_equal_policy_and_reference_leave_the_score_alone() -> None:
    credit = _assign(WORKED)
    assert credit.metrics["mappa/kl_to_reference"] == 0.0
    (a, *rest), (b, *others) = _trained(credit)
    assert rest == [a, a]
    assert others == [b]


def test_m09_the_kl_lowers_the_return_of_what_comes_before_it() -> None:
    (first, second, third), _ = _trained(_assign(WORKED, kls=[[0.0, 1.0, 0.0], [0.0, 0.0]]))
    assert first == second < third


def test_m12_the_order_of_the_samples_changes_nothing() -> None:
    (a, b), (d, c) = _trained(_assign(WORKED, kls=KLS)), _trained(_assign(WORKED[::-1], kls=KLS[::-1]))
    assert (c, d) == (pytest.approx(a, abs=1e-12), pytest.approx(b, abs=1e-12))


def test_m25_the_weights_of_a_policy_add_up_to_one_whatever_its_samples() -> None:
    scored = [_one(f"t{i}/0", float(i % 11), 1 + i % 5, agent="ab"[i % 3 == 0]) for i in range(79)]
    credited = _assign(scored, kls=[[0.01 * j for j in range(1 + i % 5)] for i in range(79)]).credited
    assert len(credited) == 79
    for agent in "ab":
        assert sum(sum(c.weights) for c in credited if c.sample.agent == agent) == pytest.approx(1.0, abs=1e-9)


def test_m12_each_policy_or_agent_is_normalised_by_itself() -> None:
    scored = [_one("t/0", 8.0, 2), _one("u/0", 3.0, 2), _one("v/0", 1.0, 2, "b"), _one("w/0", 0.0, 2, "b")]
    assert _trained(_assign(scored)) == [pytest.approx([s, s]) for s in (1.0, -1.0, 1.0, -1.0)]
    turns = [
        replace(
            s.trajectory.turns[0],
            action=_turn(s.trajectory.turns[0].action.agent, (1,), (5, 6), 0, policy="shared").action,
        )
        for s in scored
    ]
    shared = [replace(s, trajectory=replace(s.trajectory, turns=(t,))) for s, t in zip(scored, turns, strict=True)]
    by_policy = _trained(_assign(shared))
    assert by_policy[2][0] < 0
    by_agent = _assign(shared, MappaConfig(normalise_over="agent"), groups=["a", "b"])
    assert _trained(by_agent)[2] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("score", [0.0, 5.0, 10.0])
def test_m13_equal_scores_and_no_kl_give_exactly_nothing(score: float) -> None:
    credit = _assign([_one("t/0", score, 3), _one("u/0", score, 2)])
    assert all(a == 0.0 for row in _trained(credit) for a in row)
    assert credit.metrics["mappa/degenerate_groups"] == 1.0


def test_m13_equal_scores_with_kl_pull_to_the_reference_at_its_true_size() -> None:
    credit = _assign([_one("t/0", 5.0, 2), _one("u/0", 5.0, 1)], kls=[[0.1, 0.2], [0.4]])
    assert _trained(credit) == [pytest.approx([-0.003, -0.002]), pytest.approx([-0.004])]
    single = _assign([_one("t/0", 7.0, 2)])
    assert _trained(single) == [[0.0, 0.0]]
    assert _assign([], groups=["a"]).credited == ()


def test_m14_prompt_ids_mean_nothing() -> None:
    renamed = [replace(s, trajectory=replace(s.trajectory, task=Task("same", "q"))) for s in WORKED]
    assert [c.advantages for c in _assign(renamed, kls=KLS).credited] == [
        c.advantages for c in _assign(WORKED, kls=KLS).credited
    ]


def test_m15_the_clipped_surrogate() -> None:
    ratio_T, advantage_T = torch.tensor([1.5, 0.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    loss_T = -clipped_surrogate(ratio_T.log(), advantage_T, 0.2, 0.2)
    assert loss_T.tolist() == pytest.approx([-1.2, 0.8, 1.5, -0.5])


def _two_turns(scores: Sequence[float | None], finishes: Sequence[str] = ("stop", "stop")) -> ScoredTrajectory:
    first = _turn("a", (1, 2), (10, 11), 0, finishes[0])
    second = _turn("a", (1, 2, 10, 11, 7, 8), (12, 13, 14), 1, finishes[1])
    return _trajectory("t/0", [first, second], scores)


def test_m16_m17_a_context_is_one_sample_and_only_sampled_tokens_are_trained() -> None:
    made = _samples([_two_turns([4.0, 9.0])])
    (sample,) = made.samples
    assert sample.ids == (1, 2, 10, 11, 7, 8, 12, 13, 14)
    assert [t for t, m in enumerate(sample.loss_mask) if m] == [2, 3, 6, 7, 8]
    credit = _assign([_two_turns([4.0, 9.0]), _one("u/0", 1.0, 1)])
    assert all(
        a == w == 0.0
        for a, w, m in zip(credit.credited[0].advantages, credit.credited[0].weights, sample.loss_mask, strict=True)
        if not m
    )
    low, high = credit.credited[0].advantages[2], credit.credited[0].advantages[6]
    assert low < high


@pytest.mark.parametrize("junk", [math.nan, -1e9, 7.0])
def test_m16_values_at_tokens_that_nobody_sampled_change_nothing(junk: float) -> None:
    made = _samples([_two_turns([4.0, 9.0]), _one("u/0", 1.0, 4)])
    clean = _with_kl(made.samples)

    def spoiled(one: ScoredSample) -> ScoredSample:
        mask = one.sample.loss_mask
        old, reference = (
            tuple(v if m else junk for v, m in zip(values, mask, strict=True)) for values in (one.old, one.reference)
        )
        return ScoredSample(one.sample, old, reference)

    first, second = (
        assign(scored, made.rewards, DEFAULT, groups=["a"]) for scored in (clean, [spoiled(one) for one in clean])
    )
    for a, b in zip(first.credited, second.credited, strict=True):
        assert (a.advantages, a.weights) == (b.advantages, b.weights)
    assert first.metrics == second.metrics


def test_m05_a_missing_score_masks_its_action_alone_and_enters_nothing() -> None:
    whole = [_two_turns([None, 9.0]), _one("u/0", 2.0, 2)]
    credit = _assign(whole)
    sample = credit.credited[0].sample
    assert sample.reasons[2:4] == (MaskReason.REWARD_MISSING,) * 2
    assert credit.credited[0].advantages[2:4] == credit.credited[0].weights[2:4] == (0.0, 0.0)
    alone = _assign([_one("t/0", 9.0, 3), _one("u/0", 2.0, 2)])
    assert _trained(credit) == _trained(alone)
    assert credit.metrics["mappa/missing_scores"] == 1.0
    assert credit.metrics["mappa/actions"] == 3.0
    assert credit.metrics["mappa/actions_trained"] == 2.0


def test_m24_a_truncated_completion_is_in_neither_loss_nor_statistics_and_is_counted() -> None:
    four = [_one("t/0", 8.0, 2), _one("u/0", 3.0, 3), _one("v/0", 0.0, 4, finish="length"), _one("w/0", 6.0, 1)]
    credit = _assign(four)
    others = _assign([four[0], four[1], four[3]])
    assert [r for r in _trained(credit) if r] == _trained(others)
    assert credit.metrics["mappa/truncation_rate"] == 0.25
    assert credit.credited[2].weights == (0.0,) * 6
    kept = _assign(four, MappaConfig(mask_truncated=False))
    assert len(_trained(kept)[2]) == 4


def test_m26_a_failed_rollout_keeps_the_actions_that_were_completed_and_scored() -> None:
    failed = _trajectory("t/0", [_turn("a", (1,), (10, 11), 0)], [8.0], status="failed")
    made = _samples([failed])
    assert made.samples[0].num_trained == 2
    assert made.samples[0].score.missing


def test_a_frozen_agent_is_not_trained_and_not_counted() -> None:
    made = _samples([_one("t/0", 8.0, 2), _one("u/0", 2.0, 2, agent="b")], frozen=("b",))
    assert made.samples[1].reasons[2:] == (MaskReason.FROZEN,) * 2
    credit = assign(_with_kl(made.samples), made.rewards, DEFAULT, groups=["a", "b"])
    assert credit.metrics["mappa/actions"] == 1.0


def _three(scores: Sequence[float | None], outcome: float | None = None) -> ScoredTrajectory:
    turns = [_turn("a", (1,), (10,), 0), _turn("b", (2,), (11,), 1), _turn("a", (1, 10, 5), (12,), 2)]
    turns.append(_turn("a", (1, 10, 5, 12, 6), (13,), 3))
    return _trajectory("t/0", turns, scores, outcome)


def test_x04_m11_rewards_stay_with_their_action_unless_asked_to_run_on() -> None:
    scored = _three([2.0, 7.0, 5.0, 9.0])
    assert action_rewards(scored, DEFAULT) == pytest.approx((0.2, 0.7, 0.5, 0.9))
    assert action_rewards(scored, MappaConfig(return_to_go="agent")) == pytest.approx((1.6, 0.7, 1.4, 0.9))
    half = action_rewards(scored, MappaConfig(return_to_go="agent", gamma=0.5))
    assert half == pytest.approx((0.2 + 0.25 + 0.225, 0.7, 0.95, 0.9))
    missing = action_rewards(_three([2.0, 7.0, None, 9.0]), MappaConfig(return_to_go="agent"))
    assert missing == (None, 0.7, None, 0.9)


def test_m07_x04_the_outcome_enters_by_its_weight_alone() -> None:
    scores = [2.0, 7.0, 5.0, 9.0]
    assert action_rewards(_three(scores, 1.0), DEFAULT) == action_rewards(_three(scores, 0.0), DEFAULT)
    assert action_rewards(_three(scores), DEFAULT) == action_rewards(_three(scores, 0.0), DEFAULT)
    mixed = MappaConfig(process_weight=0.7, outcome_weight=0.3)
    assert action_rewards(_three(scores, 1.0), mixed) == pytest.approx((0.44, 0.79, 0.65, 0.93))
    assert action_rewards(_three(scores), mixed) == (None,) * 4
    last = MappaConfig(outcome_weight=1.0, return_to_go="agent")
    assert action_rewards(_three(scores, 1.0), last) == pytest.approx((2.6, 1.7, 2.4, 1.9))


def test_x06_the_same_trajectories_under_other_credit() -> None:
    def pair(task: str, outcomes: Sequence[float], scores: Sequence[float]) -> list[ScoredTrajectory]:
        turns = [_turn("a", (1, 2), (10, 11), 0)]
        return [
            _trajectory(f"{task}/{g}", turns, [s], o) for g, (o, s) in enumerate(zip(outcomes, scores, strict=True))
        ]

    scored = pair("t", (1.0, 0.0), (2.0, 8.0)) + pair("u", (1.0, 1.0), (5.0, 5.0))
    first = {
        credit: [row[0] for row in _trained(_assign(scored, MappaConfig(credit=credit, kl_coef=0.0)))]
        for credit in ("process", "outcome", "grpo", "supervised")
    }
    assert first["process"] == pytest.approx([-math.sqrt(2), math.sqrt(2), 0.0, 0.0])
    assert first["outcome"] == pytest.approx([1 / math.sqrt(3), -math.sqrt(3), 1 / math.sqrt(3), 1 / math.sqrt(3)])
    assert first["grpo"] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0, 0.0], abs=1e-5)
    assert first["supervised"] == [1.0, 0.0, 1.0, 1.0]


def test_a_missing_outcome_masks_where_the_outcome_is_the_credit() -> None:
    scored = [_trajectory("t/0", [_turn("a", (1,), (10,), 0)], [5.0], None)]
    for credit in ("outcome", "grpo", "supervised"):
        made = _samples(scored, MappaConfig(credit=credit))
        assert made.samples[0].reasons[1:] == (MaskReason.REWARD_MISSING,)
        assert _assign(scored, MappaConfig(credit=credit)).credited[0].weights == (0.0, 0.0)


def test_the_loss_is_a_mean_over_tokens_or_over_actions() -> None:
    scored = [_two_turns([4.0, 9.0]), _one("u/0", 1.0, 5)]
    by_token = _assign(scored).credited
    assert {w for c in by_token for w in c.weights if w} == {0.1}
    by_action = _assign(scored, MappaConfig(loss_mean="sequence")).credited
    assert by_action[0].weights[2] == pytest.approx(1 / 6)
    assert by_action[0].weights[6] == pytest.approx(1 / 9)
    assert by_action[1].weights[2] == pytest.approx(1 / 15)
    assert sum(sum(c.weights) for c in by_action) == pytest.approx(1.0)
    half = token_weights([by_token[1].sample], DEFAULT)
    assert float(half[0].sum()) == pytest.approx(1.0)


def test_the_kl_in_the_reward_needs_both_log_probabilities() -> None:
    made = _samples(WORKED)
    bare = [ScoredSample(s) for s in made.samples]
    with pytest.raises(ValueError, match="needs old and reference"):
        assign(bare, made.rewards, DEFAULT, groups=["a"])
    credit = assign(bare, made.rewards, MappaConfig(kl_coef=0.0), groups=["a"])
    assert _trained(credit)[0][0] > 0
