from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantage import group_advantages
from agentrl.algo.sampling import balance_counts, weighted_balance_counts


@given(st.integers(1, 24), st.integers(0, 2**32))
def test_a7_balancing_ends_at_exactly_the_target_for_up_to_20_times_as_many(target: int, seed: int) -> None:
    rng = random.Random(seed)
    for m in {1, 2, target, target + 1, 7 * target + 3, 20 * target}:
        counts = balance_counts(m, target, rng)
        assert len(counts) == m
        assert sum(counts) == target


def test_a7_no_samples_and_no_target() -> None:
    assert balance_counts(0, 16, random.Random(0)) == []
    assert weighted_balance_counts([], 16, random.Random(0)) == []
    assert balance_counts(3, 0, random.Random(0)) == [0, 0, 0]


def test_a7_equal_numbers_are_the_identity() -> None:
    assert balance_counts(16, 16, random.Random(0)) == [1] * 16


def test_a8_down_sampling_is_uniform_and_without_duplicates() -> None:
    m, target, draws, rng = 40, 16, 20_000, random.Random(11)
    hits = [0] * m
    for _ in range(draws):
        counts = balance_counts(m, target, rng)
        assert max(counts) == 1
        for i, c in enumerate(counts):
            hits[i] += c
    p = target / m
    sigma = math.sqrt(p * (1 - p) / draws)
    assert all(abs(h / draws - p) <= 4 * sigma for h in hits)


@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 2**32))
def test_a9_up_sampling_keeps_every_original_and_copies_differ_by_at_most_one(m: int, extra: int, seed: int) -> None:
    counts = balance_counts(m, m + extra, random.Random(seed))
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


def test_a9_the_remainder_is_drawn_uniformly() -> None:
    m, target, draws, rng = 7, 16, 20_000, random.Random(5)
    threes = [0] * m
    for _ in range(draws):
        for i, c in enumerate(balance_counts(m, target, rng)):
            threes[i] += c == 3
    sigma = math.sqrt(2 / 7 * 5 / 7 / draws)
    assert all(abs(h / draws - 2 / 7) <= 4 * sigma for h in threes)


def test_a10_same_seed_same_draw() -> None:
    draws = [[balance_counts(m, 16, random.Random(9)) for m in (5, 40, 90)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert balance_counts(90, 16, random.Random(9)) != balance_counts(90, 16, random.Random(10))


@pytest.mark.parametrize("num_wins", [3, 20])
def test_a11_the_kept_mean_advantage_is_unbiased(num_wins: int) -> None:
    advantages = [a or 0.0 for a in group_advantages([1.0] * num_wins + [0.0] * (40 - num_wins))]
    rng = random.Random(2)
    means = []
    for _ in range(20_000):
        counts = balance_counts(40, 16, rng)
        means.append(sum(c * a for c, a in zip(counts, advantages, strict=True)) / 16)
    assert abs(statistics.fmean(means)) <= 4 * statistics.stdev(means) / math.sqrt(len(means))


def test_a8_weighted_draws_prefer_large_weights_and_take_zero_weights_last() -> None:
    rng = random.Random(1)
    weights = [4.0, 1.0, 1.0, 0.0]
    hits = [0, 0, 0, 0]
    for _ in range(6000):
        counts = weighted_balance_counts(weights, 1, rng)
        hits = [h + c for h, c in zip(hits, counts, strict=True)]
    assert hits[3] == 0
    assert abs(hits[0] / 6000 - 4 / 6) < 4 * math.sqrt(4 / 6 * 2 / 6 / 6000)
    assert weighted_balance_counts(weights, 3, rng) == [1, 1, 1, 0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.integers(0, 60), st.integers(0, 2**32))
def test_weighted_counts_also_sum_to_the_target(weights: list[float], target: int, seed: int) -> None:
    counts = weighted_balance_counts(weights, target, random.Random(seed))
    assert sum(counts) == target
    assert max(counts) - min(counts) <= 1


def test_equal_or_zero_weights_draw_uniformly() -> None:
    for weights in ([0.0] * 5, [2.5] * 5):
        rng, hits = random.Random(4), [0] * 5
        for _ in range(5000):
            hits = [h + c for h, c in zip(hits, weighted_balance_counts(weights, 2, rng), strict=True)]
        assert all(abs(h / 5000 - 0.4) < 4 * math.sqrt(0.24 / 5000) for h in hits)


def test_impossible_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        balance_counts(-1, 3, random.Random(0))
    with pytest.raises(ValueError, match="negative"):
        balance_counts(3, -1, random.Random(0))
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            weighted_balance_counts([bad, 1.0], 1, random.Random(0))
