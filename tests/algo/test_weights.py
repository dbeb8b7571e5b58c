from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.loss import policy_loss
from agentrl.algo.weights import sequence_mean_weights, token_mean_weights

sets = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=12).map(
    lambda rows: ([n for n, _ in rows], [c for _, c in rows])
)


def loss_at_ratio_one(weights: list[float], num_trained: list[int], advantages: list[float]) -> float:
    weights_T = torch.tensor([w for w, n in zip(weights, num_trained, strict=True) for _ in range(n)])
    advantages_T = torch.tensor([a for a, n in zip(advantages, num_trained, strict=True) for _ in range(n)])
    zeros_T = torch.zeros_like(weights_T)
    return float(policy_loss(zeros_T, zeros_T, advantages_T, weights_T).loss)


def test_l1_sequence_mean_and_token_mean_differ_as_computed_by_hand() -> None:
    lengths, advantages = [2, 8], [1.0, -1.0]
    assert loss_at_ratio_one(sequence_mean_weights(lengths, [1, 1]), lengths, advantages) == pytest.approx(0, abs=1e-6)
    assert loss_at_ratio_one(token_mean_weights(lengths, [1, 1]), lengths, advantages) == pytest.approx(0.6, abs=1e-6)


@given(sets)
def test_weights_of_all_trained_tokens_sum_to_one_unless_nothing_is_trained(
    rows: tuple[list[int], list[float]],
) -> None:
    lengths, copies = rows
    trains = any(n and c for n, c in zip(lengths, copies, strict=True))
    for make in (sequence_mean_weights, token_mean_weights):
        total = sum(w * n for w, n in zip(make(lengths, copies), lengths, strict=True))
        assert total == pytest.approx(1.0 if trains else 0.0)


@given(sets, st.integers(2, 5))
def test_l5_repeating_the_whole_set_changes_no_mean(rows: tuple[list[int], list[float]], times: int) -> None:
    lengths, copies = rows
    for make in (sequence_mean_weights, token_mean_weights):
        once = make(lengths, copies)
        assert make(lengths, [c * times for c in copies]) == pytest.approx(once)
        repeated = make(lengths * times, copies * times)
        assert [w * times for w in repeated[: len(lengths)]] == pytest.approx(once)


def test_copies_equal_duplicated_rows() -> None:
    assert sequence_mean_weights([4, 2], [3, 1]) == pytest.approx([3 / (4 * 4), 1 / (4 * 2)])
    duplicated = sequence_mean_weights([4, 4, 4, 2], [1, 1, 1, 1])
    assert sum(duplicated[:3]) == pytest.approx(3 / 16)
    assert duplicated[3] == pytest.approx(1 / 8)


def test_a_sample_without_trained_tokens_or_copies_is_absent() -> None:
    for make in (sequence_mean_weights, token_mean_weights):
        first, second = make([2, 8], [1, 1])
        assert make([2, 0, 8, 5], [1, 1, 1, 0]) == pytest.approx([first, 0.0, second, 0.0])
        assert make([0, 0], [1, 1]) == [0.0, 0.0]
        assert make([], []) == []


def test_parts_of_a_split_trajectory_count_as_one_sample() -> None:
    weights = sequence_mean_weights([3, 6, 5], [0.5, 0.5, 1.0])
    assert weights[0] * 3 + weights[1] * 6 == pytest.approx(weights[2] * 5)


@pytest.mark.parametrize(
    ("lengths", "copies"), [([1, 2], [1]), ([1], [1, 1]), ([-1], [1]), ([1], [-1]), ([1], [math.nan])]
)
def test_impossible_inputs_are_refused(lengths: list[int], copies: list[float]) -> None:
    for make in (sequence_mean_weights, token_mean_weights):
        with pytest.raises(ValueError, match=r"per sample|negative"):
            make(lengths, copies)
