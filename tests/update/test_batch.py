"""Rows: what is shared, what is kept apart, and that their order of arrival is forgotten."""

from __future__ import annotations

import random

import pytest
import torch

from agentrl.update.batch import pack

LAYOUTS = ("tree", "packed", "padded")


def _row(batch):
    return (
        batch.part,
        batch.ids_BT.tolist(),
        batch.places.hidden_U.tolist(),
        batch.places.target_N.tolist(),
        batch.advantages_N.tolist(),
        batch.weights_N.tolist(),
        batch.token_N,
    )


def test_a_tree_computes_a_shared_beginning_once_and_keeps_branches_apart(make_credited):
    stem = list(range(10, 20))
    one, two = make_credited([*stem, 1, 2], [(10, 12)], name="x"), make_credited([*stem, 1, 3, 4], [(10, 13)], name="y")
    (batch,) = pack([one, two], capacity=100, layout="tree")
    assert batch.ids_BT.tolist() == [[*stem, 1, 2, 3, 4]]
    assert batch.positions_BT.tolist() == [[*range(12), 11, 12]]
    mask_TT = batch.mask[0, 0]
    assert mask_TT[13].nonzero()[:, 0].tolist() == [*range(11), 12, 13]  # not the other branch's token 11
    assert (batch.num_tokens, batch.num_filled, batch.num_cells) == (25, 14, 14)
    (side_by_side,) = pack([one, two], capacity=100, layout="packed")
    assert (side_by_side.num_tokens, side_by_side.num_filled, side_by_side.num_cells) == (25, 25, 25)
    (padded,) = pack([one, two], capacity=100, layout="padded")
    assert (padded.num_tokens, padded.num_filled, padded.num_cells) == (25, 25, 26)
    # Both predict their first token at the stem's end, and the second at the shared token 1: two places, four tokens.
    assert len(batch.places.hidden_U) == 3
    assert batch.places.target_N.tolist() == [1, 2, 1, 3, 4]


def test_places_differ_by_temperature_and_allowed_set(make_credited):
    import numpy as np

    warm = make_credited([5, 6, 7], [(1, 3)], name="w", temperature=0.5)
    cold = make_credited([5, 6, 7], [(1, 3)], name="v")
    (batch,) = pack([warm, cold], capacity=100, layout="tree")
    assert sorted(batch.places.temperature_U.tolist()) == [0.5, 0.5, 1.0, 1.0]
    sets = {"w": {1: np.array([1 << 6], dtype=np.int32)}, "v": {}}
    warm = make_credited([5, 6, 7], [(1, 3)], name="w")
    (batch,) = pack([warm, cold], capacity=100, layout="tree", allowed_sets=lambda s: sets[s.sample.id])
    assert sorted(batch.places.allowed_UW[:, 0].tolist()) == [-1, -1, 64]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [1, 40, 90, 10_000])
def test_every_trained_token_stands_in_one_row_of_its_part(family, layout, capacity):
    credited = family(24)
    seen = set()
    for batch in pack(credited, capacity=capacity, layout=layout):
        members = set(batch.sample_N)
        assert {credited[i].sample.part for i in members} == {batch.part}
        assert batch.num_cells <= capacity or len(members) == 1
        flat = batch.ids_BT.flatten().tolist()
        for n, (i, t) in enumerate(zip(batch.sample_N, batch.token_N, strict=True)):
            cell = int(batch.places.hidden_U[batch.places.place_N[n]])
            assert flat[cell] == credited[i].sample.ids[t - 1]
            assert int(batch.places.target_N[n]) == credited[i].sample.ids[t]
            assert batch.weights_N[n] == pytest.approx(credited[i].weights[t])
            assert (i, t) not in seen
            seen.add((i, t))
    assert seen == {(i, t) for i, c in enumerate(credited) for t, r in enumerate(c.sample.reasons) if r is None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_depend_on_the_order_of_the_samples(family, layout):
    credited = family(20)
    shuffled = random.Random(4).sample(credited, len(credited))
    first, second = (pack(c, capacity=60, layout=layout) for c in (credited, shuffled))
    assert [_row(b) for b in first] == [_row(b) for b in second]


def test_a_sample_without_a_trained_token_is_left_out(make_credited):
    nothing = make_credited([4, 5, 6], [(1, 3)], masked=(1, 2))
    assert pack([nothing], capacity=10, layout="tree") == []


def test_old_and_reference_are_nan_where_none_is_given(make_credited):
    given = make_credited([4, 5, 6], [(1, 3)], name="a", old=(0.0, -1.0, -2.0), reference=(0.0, -3.0, -4.0))
    none = make_credited([7, 5, 6], [(1, 3)], name="b")
    (batch,) = pack([given, none], capacity=50, layout="packed")
    by_sample = {i: [n for n, s in enumerate(batch.sample_N) if s == i] for i in (0, 1)}
    assert batch.old_N[by_sample[0]].tolist() == [-1.0, -2.0]
    assert batch.reference_N[by_sample[0]].tolist() == [-3.0, -4.0]
    assert torch.isnan(batch.old_N[by_sample[1]]).all()
