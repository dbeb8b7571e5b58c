from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.packing import Bin, first_fit_decreasing

instances = st.integers(1, 60).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(0, c + 20), max_size=30)))


def naive_ffd(lengths: list[int], capacity: int) -> list[list[int]]:
    """The definition, quadratic: the oracle for the tree search."""
    bins: list[tuple[list[int], int]] = []
    for item in sorted((i for i, n in enumerate(lengths) if n <= capacity), key=lambda i: (-lengths[i], i)):
        for k, (items, used) in enumerate(bins):
            if used + lengths[item] <= capacity:
                bins[k] = ([*items, item], used + lengths[item])
                break
        else:
            bins.append(([item], lengths[item]))
    return [items for items, _ in bins]


def optimal_bins(lengths: list[int], capacity: int) -> int:
    best = len(lengths)

    def place(k: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if k == len(lengths):
            best = len(loads)
            return
        for j in range(len(loads)):
            if loads[j] + lengths[k] <= capacity and loads[j] not in loads[:j]:
                place(k + 1, [*loads[:j], loads[j] + lengths[k], *loads[j + 1 :]])
        place(k + 1, [*loads, lengths[k]])

    place(0, [])
    return best


def random_instance(rng: random.Random) -> tuple[list[int], int]:
    capacity = rng.randint(1, 100)
    return [rng.randint(0, int(capacity * 1.3) + 1) for _ in range(rng.randint(0, 25))], capacity


def test_p1_p2_bins_hold_at_most_capacity_and_every_item_once_on_10000_instances() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        lengths, capacity = random_instance(rng)
        bins = first_fit_decreasing(lengths, capacity)
        assert sorted(i for b in bins for i in b.items) == list(range(len(lengths)))
        for b in bins:
            assert b.used == sum(min(lengths[i], capacity) for i in b.items) <= capacity
            assert b.truncated == (lengths[b.items[0]] > capacity)
            assert not b.truncated or len(b.items) == 1


def test_p3_bins_stay_within_the_ffd_bound_of_the_optimum() -> None:
    rng = random.Random(1)
    for _ in range(400):
        capacity = rng.randint(5, 40)
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(0, 10))]
        num_bins, optimum = len(first_fit_decreasing(lengths, capacity)), optimal_bins(lengths, capacity)
        assert optimum <= num_bins <= math.floor(11 / 9 * optimum + 6 / 9)
        assert math.ceil(sum(lengths) / capacity) <= num_bins <= len(lengths)


@pytest.mark.parametrize(
    ("capacity", "lengths", "expected"),
    [
        (10, [7, 5, 5, 4, 3, 3, 2, 1], [[7, 3], [5, 5], [4, 3, 2, 1]]),
        (10, [25, 4, 4], [[25], [4, 4]]),
        (10, [4, 10, 11], [[11], [10], [4]]),
        (10, [], []),
    ],
)
def test_p4_vectors(capacity: int, lengths: list[int], expected: list[list[int]]) -> None:
    assert [[lengths[i] for i in b.items] for b in first_fit_decreasing(lengths, capacity)] == expected


def test_p4_thirty_items_take_exactly_eleven_bins_as_first_fit_decreasing_does() -> None:
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    random.Random(3).shuffle(lengths)
    assert len(first_fit_decreasing(lengths, 100)) == 11


def test_p4_twenty_two_pages_of_5000_tokens_take_six_prompts() -> None:
    assert len(first_fit_decreasing([5000] * 22, 23552)) == 6


@given(instances)
def test_p5_at_most_one_bin_is_at_most_half_full(instance: tuple[int, list[int]]) -> None:
    capacity, lengths = instance
    assert sum(2 * b.used <= capacity for b in first_fit_decreasing(lengths, capacity) if not b.truncated) <= 1


@given(instances)
def test_p6_same_result_as_the_definition_with_ties_by_index(instance: tuple[int, list[int]]) -> None:
    capacity, lengths = instance
    bins = first_fit_decreasing(lengths, capacity)
    assert [list(b.items) for b in bins if not b.truncated] == naive_ffd(lengths, capacity)
    assert bins == first_fit_decreasing(tuple(lengths), capacity)
    truncated = [b.items[0] for b in bins[: sum(n > capacity for n in lengths)]]
    assert truncated == [i for i, n in enumerate(lengths) if n > capacity]


def test_p6_equal_lengths_are_placed_by_index() -> None:
    assert first_fit_decreasing([5, 5, 5, 5], 10) == [Bin((0, 1), 10, False), Bin((2, 3), 10, False)]


def test_nothing_joins_a_truncated_bin_and_its_use_is_the_capacity() -> None:
    assert first_fit_decreasing([0, 25, 4], 10) == [Bin((1,), 10, True), Bin((2, 0), 4, False)]


def test_bins_name_their_first_item_for_merging() -> None:
    assert [b.first_item for b in first_fit_decreasing([1, 6, 5, 4, 3], 10)] == [1, 0]


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**30))
def test_ten_thousand_items_pack_in_well_under_a_second(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(501, 1000) for _ in range(10_000)]  # one item a bin: the worst case of a linear search
    start = time.process_time()
    assert len(first_fit_decreasing(lengths, 1000)) == 10_000
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(("lengths", "capacity"), [([1], 0), ([1], -3), ([-1], 5)])
def test_impossible_inputs_are_refused(lengths: list[int], capacity: int) -> None:
    with pytest.raises(ValueError, match=r"capacity|negative"):
        first_fit_decreasing(lengths, capacity)
