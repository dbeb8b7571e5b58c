from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantage import (
    batch_advantages,
    group_advantages,
    group_stats,
    mean_and_variance,
    moments,
    returns_to_go,
    scores_are_degenerate,
    token_rewards,
    whiten_from_moments,
)

scores = st.lists(st.sampled_from([0.0, 0.25, 0.3, 1.0, 10.0, -2.0]) | st.none(), min_size=0, max_size=20)
WIN, LOSS = 1.0, 0.0


@pytest.mark.parametrize(
    ("rewards", "unbiased", "expected"),
    [
        ([1, 0, 0, 1], False, [1, -1, -1, 1]),
        ([1, 0, 0, 1], True, [0.8660, -0.8660, -0.8660, 0.8660]),
        ([1, 0, 0, 0, 1], False, [1.2247, -0.8165, -0.8165, -0.8165, 1.2247]),
        ([1, 0, 0, 0, 1], True, [1.0954, -0.7303, -0.7303, -0.7303, 1.0954]),
    ],
)
def test_a2_vectors_in_both_conventions(rewards: list[float], unbiased: bool, expected: list[float]) -> None:
    assert group_advantages(rewards, unbiased=unbiased) == pytest.approx(expected, abs=1e-4)


def test_a2_one_baseline_over_both_roles_would_give_other_numbers() -> None:
    joint = group_advantages([1, 0, 0, 1, 1, 0, 0, 0, 1], unbiased=False)
    assert joint[:4] != pytest.approx([1, -1, -1, 1], abs=1e-2)


@given(scores, st.booleans())
def test_a3_present_advantages_sum_to_zero_with_unit_variance_or_are_all_zero(
    values: list[float | None], unbiased: bool
) -> None:
    advantages = group_advantages(values, unbiased=unbiased)
    stats = group_stats(values, unbiased=unbiased)
    assert [a is None for a in advantages] == [v is None for v in values]
    present = [a for a in advantages if a is not None]
    assert stats.n == len(present)
    assert abs(sum(present)) < 1e-4
    if stats.degenerate:
        assert present == [0.0] * len(present)
    else:
        variance = statistics.variance(present) if unbiased else statistics.pvariance(present)
        assert variance == pytest.approx(1.0, abs=1e-4)


def test_a4_statistics_are_those_of_all_forty_samples() -> None:
    rewards = [WIN] * 10 + [LOSS] * 30
    advantages = group_advantages(rewards, unbiased=False)
    p = 10 / 40
    assert advantages[0] == pytest.approx(math.sqrt((1 - p) / p), abs=1e-4)
    assert advantages[-1] == pytest.approx(-math.sqrt(p / (1 - p)), abs=1e-4)


def test_a6_the_number_of_system_1_samples_leaves_system_2_alone() -> None:
    outcomes = [1.0, 0.0, 0.0, 1.0]
    for num_bins in ([1, 3, 0, 1], [9, 0, 0, 2]):
        system_1 = group_advantages([r for r, n in zip(outcomes, num_bins, strict=True) for _ in range(n)])
        assert len(system_1) == sum(num_bins)
        assert group_advantages(outcomes) == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)


@pytest.mark.parametrize("rewards", [[WIN] * 16, [LOSS] * 16, [0.1 + 0.2, 0.3, 0.3], [WIN], [LOSS]])
def test_a12_groups_without_signal_give_exact_zeros_and_say_so(rewards: list[float]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)
    assert group_stats(rewards).degenerate


def test_seven_of_eight_scores_missing_gives_zero_not_nan() -> None:
    values = [None] * 7 + [1.0]
    assert group_advantages(values) == [None] * 7 + [0.0]
    assert group_stats(values).n == 1
    assert group_advantages([None] * 8) == [None] * 8
    assert group_stats([None] * 8).degenerate
    assert group_advantages([]) == []


def test_a_missing_score_does_not_shift_the_others() -> None:
    with_gap = group_advantages([1.0, None, 0.0, 0.0])
    assert [a for a in with_gap if a is not None] == group_advantages([1.0, 0.0, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_is_refused_also_inside_a_constant_group(bad: float) -> None:
    with pytest.raises(ValueError, match="None where missing"):
        group_advantages([1.0, 1.0, bad, 1.0])


def test_a_scalar_or_generator_of_rewards_is_refused_not_broadcast() -> None:
    for wrong in (1.0, torch.tensor(1.0)):
        with pytest.raises(TypeError):
            group_advantages(wrong)  # type: ignore[arg-type]
    tensor_G = torch.tensor([1.0, 0.0])
    assert len(group_advantages(tensor_G.tolist())) == 2


# Returns and whitening: MAPPA section 3.1 with the worked example of 3.2

K = [[0.1, -0.2, 0.3], [0.0, 0.5]]


def worked_returns(rhos: tuple[float, float], beta: float = 0.01) -> torch.Tensor:
    return torch.cat(
        [
            returns_to_go(token_rewards(torch.tensor(k, dtype=torch.float64), rho, beta))
            for k, rho in zip(K, rhos, strict=True)
        ]
    )


def whitened(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """One batch by its own statistics."""
    return whiten_from_moments(values_T, mask_T, moments(values_T, mask_T))


def test_m10_score_on_the_last_token_and_undiscounted_token_returns() -> None:
    rewards_T = token_rewards(torch.tensor(K[0], dtype=torch.float64), 0.8, 0.01)
    assert rewards_T.tolist() == pytest.approx([-0.001, 0.002, 0.797], abs=1e-12)
    assert worked_returns((0.8, 0.3)).tolist() == pytest.approx([0.798, 0.799, 0.797, 0.295, 0.295], abs=1e-9)


def test_m12_worked_example() -> None:
    returns_T = worked_returns((0.8, 0.3))
    mask_T = torch.ones(5, dtype=torch.bool)
    mean, variance = mean_and_variance(moments(returns_T, mask_T))
    assert mean == pytest.approx(0.5968, abs=1e-12)
    assert variance == pytest.approx(0.06072256, abs=1e-10)
    assert whitened(returns_T, mask_T).tolist() == pytest.approx([0.8165, 0.8206, 0.8124, -1.2247, -1.2247], abs=1e-4)


def test_m12_raw_scores_make_the_kl_ten_times_smaller() -> None:
    advantages_T = whitened(worked_returns((8.0, 3.0)), torch.ones(5, dtype=torch.bool))
    assert advantages_T.tolist() == pytest.approx([0.8165, 0.8169, 0.8161, -1.2247, -1.2247], abs=1e-4)


@pytest.mark.parametrize("split", [[3, 2], [5, 0], [0, 5], [1, 1, 3]])
def test_m12_ranks_agree_with_one_rank_even_when_one_is_empty(split: list[int]) -> None:
    returns_T = worked_returns((0.8, 0.3)).float()
    ones_T = torch.ones(5, dtype=torch.bool)
    shares = returns_T.split(split)
    reduced_3 = torch.stack([moments(s, torch.ones_like(s, dtype=torch.bool)) for s in shares]).sum(0)
    parts = [whiten_from_moments(s, torch.ones_like(s, dtype=torch.bool), reduced_3) for s in shares]
    assert torch.allclose(torch.cat(parts), whitened(returns_T, ones_T), atol=1e-6)


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=1, max_size=60))
def test_m12_masked_mean_is_zero_and_variance_one(rows: list[tuple[float, bool]]) -> None:
    values_T = torch.tensor([v for v, _ in rows], dtype=torch.float64)
    mask_T = torch.tensor([m for _, m in rows])
    whitened_T = whitened(values_T, mask_T)
    assert torch.isfinite(whitened_T).all()
    assert (whitened_T[~mask_T] == 0).all()
    if mask_T.any() and values_T[mask_T].var(unbiased=False) > 1e-6:
        assert abs(float(whitened_T[mask_T].mean())) < 1e-6
        assert float(whitened_T[mask_T].var(unbiased=False)) == pytest.approx(1.0, abs=1e-6)


def test_m12_statistics_are_token_weighted_and_ignore_masked_values() -> None:
    values_T = torch.tensor([1.0, 1.0, 1.0, 0.0, math.nan, 99.0])
    mask_T = torch.tensor([True, True, True, True, False, False])
    mean, variance = mean_and_variance(moments(values_T, mask_T))
    assert (mean, variance) == pytest.approx((0.75, 0.1875))
    assert torch.equal(whitened(values_T, mask_T)[4:], torch.zeros(2))


def test_m13_equal_scores_without_kl_give_exact_zeros() -> None:
    mask_T = torch.ones(4, dtype=torch.bool)
    returns_T, kl_returns_T = torch.full((4,), 0.8), torch.zeros(4)
    score_moments_3 = moments(torch.tensor([0.8, 0.8]), torch.ones(2, dtype=torch.bool))
    out = batch_advantages(returns_T, kl_returns_T, mask_T, moments(returns_T, mask_T), score_moments_3)
    assert out.degenerate
    assert torch.equal(out.values_T, torch.zeros(4))


def test_m13_equal_scores_use_the_raw_kl_returns_and_do_not_blow_them_up() -> None:
    mask_T = torch.tensor([True, True, True, False])
    kl_returns_T = torch.tensor([-0.003, 0.002, 0.001, math.nan])
    returns_T = 0.5 + kl_returns_T
    ones_A = torch.ones(3, dtype=torch.bool)
    flat_3 = moments(torch.tensor([0.5, 0.5005, 0.5]), ones_A)  # variance 5.6e-8
    out = batch_advantages(returns_T, kl_returns_T, mask_T, moments(returns_T, mask_T), flat_3)
    assert out.degenerate
    assert out.values_T.tolist() == pytest.approx([-0.003, 0.002, 0.001, 0.0])
    varied_3 = moments(torch.tensor([0.2, 0.5, 0.9]), ones_A)
    varied = batch_advantages(returns_T, kl_returns_T, mask_T, moments(returns_T, mask_T), varied_3)
    assert not varied.degenerate
    assert torch.equal(varied.values_T, whitened(returns_T, mask_T))


def test_m13_threshold_is_on_the_variance_and_fewer_than_two_scores_are_degenerate() -> None:
    two_A = torch.ones(2, dtype=torch.bool)
    assert scores_are_degenerate(moments(torch.tensor([0.5, 0.5018]), two_A))  # variance 0.81e-6
    assert not scores_are_degenerate(moments(torch.tensor([0.5, 0.5022]), two_A))  # variance 1.21e-6
    assert scores_are_degenerate(moments(torch.tensor([0.5]), two_A[:1]), threshold=0.0)
    assert scores_are_degenerate(torch.zeros(3, dtype=torch.float64))


def test_m13_an_empty_batch_is_finite() -> None:
    empty_T, mask_T = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert torch.equal(moments(empty_T, mask_T), torch.zeros(3, dtype=torch.float64))
    assert whitened(empty_T, mask_T).shape == (0,)
    assert torch.equal(whitened(torch.tensor([math.nan]), torch.tensor([False])), torch.zeros(1))


def test_every_intermediate_reward_reaches_the_turns_before_it() -> None:
    assert returns_to_go(torch.tensor([1.0, 0.0, 2.0, -1.0])).tolist() == [2.0, 1.0, 1.0, -1.0]
    assert returns_to_go(torch.tensor([0.2, 0.5, 0.9])).tolist() == pytest.approx([1.6, 1.4, 0.9])


def test_discount_and_mask_skip_what_was_not_sampled() -> None:
    rewards_T = torch.tensor([1.0, math.nan, 2.0, 5.0])
    mask_T = torch.tensor([True, False, True, True])
    assert returns_to_go(rewards_T, 0.5, mask_T).tolist() == [3.25, 0.0, 4.5, 5.0]
    assert returns_to_go(rewards_T, 1.0, mask_T).tolist() == [8.0, 0.0, 7.0, 5.0]
    kl_T = torch.tensor([0.1, math.nan, 0.3, math.nan])
    token_T = token_rewards(kl_T, 2.0, 0.1, torch.tensor([True, False, True, False]))
    assert token_T.tolist() == pytest.approx([-0.01, 0.0, 1.97, 0.0])
    assert token_rewards(kl_T, 2.0, 0.1, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4


@given(st.lists(st.floats(-5, 5), max_size=20))
def test_loop_and_cumulative_sum_agree(rewards: list[float]) -> None:
    rewards_T = torch.tensor(rewards, dtype=torch.float64)
    assert torch.allclose(returns_to_go(rewards_T, 1.0), returns_to_go(rewards_T, 1.0 - 1e-15), atol=1e-9)


def test_wrong_shapes_are_refused_not_broadcast() -> None:
    with pytest.raises(ValueError, match="per sequence"):
        returns_to_go(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="one value per token"):
        whitened(torch.zeros(3), torch.ones(1, dtype=torch.bool))
