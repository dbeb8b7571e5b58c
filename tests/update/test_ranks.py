"""Trainer ranks: real gloo processes that share updates and scores equal one process (M-12, M-13, M-25)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.schema import AlgorithmConfig
from agentrl.grammar import GrammarFactory
from agentrl.launch.distributed import Group
from agentrl.types import Grammar, MaskReason, Sample, Score, Span
from agentrl.update import step as step_module
from agentrl.update.follower import serve
from agentrl.update.ranks import Ranks, ScoreOrder
from agentrl.update.shards import split
from agentrl.update.step import update_policy

KL = AlgorithmConfig(kl_coef=0.1)


@pytest.fixture(scope="module")
def group(made, tiny_folder) -> Iterator[Group]:
    """Two ranks beside this process, with followers of tiny-llama in fp32. Tests that break them start their own."""
    group = Group.start(3, partial(serve, partial(made.build, tiny_folder["llama"], "float32")))
    yield group
    group.close()


@pytest.fixture
def pair(made, tiny_folder, group) -> tuple[Any, Any, Any, Ranks]:
    """A policy for the ranks, its like for one process, their reference, and the ranks, which hold the same weights."""
    ours, alone = (made.make(tiny_folder["llama"], "float32", "full") for _ in range(2))
    ranks = Ranks(group, 1)
    ranks.spread(ours)
    return ours, alone, made.make(tiny_folder["llama"], "float32", "frozen").scorer, ranks


def relative(a: Any, b: Any) -> float:
    difference = math.fsum(float((a[n] - b[n]).double().square().sum()) for n in b)
    return math.sqrt(difference / math.fsum(float(b[n].double().square().sum()) for n in b))


def largest(a: Any, b: Any) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in b)


CUTS = {"ragged": (32, 47, 0), "the driver has none": (0, 47, 32), "all on one": (0, 0, 79)}


@pytest.mark.parametrize("cut", CUTS)
def test_m25_m13_three_steps_of_ragged_ranks_equal_those_of_one(pair, family, monkeypatch, cut):
    ours, alone, reference, ranks = pair
    order = random.Random(1).sample(range(79), 79)
    sizes = CUTS[cut]
    starts = [sum(sizes[:k]) for k in range(3)]
    shares = [order[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    monkeypatch.setattr(
        step_module, "split", lambda samples, num, layout: shares if num == 3 else split(samples, 1, layout)
    )
    for step in range(3):
        credited = family(79, seed=step)
        mine = update_policy(ours, credited, KL, reference=reference, part_stats=step == 1, ranks=ranks)
        theirs = update_policy(alone, credited, KL, reference=reference, part_stats=step == 1)
        assert relative(ours.grads, alone.grads) < 1e-6
        assert mine.metrics["samples/moving"] == 79  # dropped: none
        assert mine.metrics["tokens/trained"] == theirs.metrics["tokens/trained"]
        assert mine.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            if name not in ("pack/shared", "tokens/computed"):  # cut elsewhere, prefixes are shared otherwise
                assert mine.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name
        assert ("grad_norm/b" in mine.metrics) == (step == 1)
        assert all(a.keys() == b.keys() for a, b in zip(mine.old, theirs.old, strict=True))
        assert all(a[t] == pytest.approx(b[t], abs=2e-5) for a, b in zip(mine.old, theirs.old, strict=True) for t in b)
    assert alone.version == ours.version == 3
    assert theirs.metrics["grad_norm"] > 0.05  # so each step was clipped, by one norm
    assert largest(ours.masters, alone.masters) < 1e-6
    began = {n: p.detach() for n, p in reference.model.named_parameters()}
    moved = [{n: m - began[n] for n, m in policy.masters.items()} for policy in (ours, alone)]
    assert relative(*moved) < 1e-4


def test_the_gradient_of_ranks_is_a_sum_and_an_update_without_effect_asks_no_rank(pair, family, made, tiny_folder):
    ours, alone, _, ranks = pair
    credited = family(9)
    update_policy(ours, credited, AlgorithmConfig(), ranks=ranks)
    update_policy(alone, credited, AlgorithmConfig())
    assert relative(ours.grads, alone.grads) < 1e-6
    before = {n: w.clone() for n, w in ours.masters.items()}
    flat = [replace(one, advantages=(0.0,) * len(one.advantages)) for one in credited]
    result = update_policy(ours, flat, AlgorithmConfig(), ranks=ranks)
    assert result.stats is None
    assert all(torch.equal(before[n], ours.masters[n]) for n in before)


def constrained(factory: Any, make_credited: Any) -> Any:
    """A sample whose tokens were taken under a grammar."""
    grammar = Grammar("regex", "[a-f]{3}x")
    matcher, sampled = factory.matcher(grammar), []
    while len(sampled) < 5:
        sampled.append(int(matcher.allowed().nonzero()[0][-1]))
        matcher.advance(sampled[-1])
    return make_credited([40, 41, 42, *sampled], [(3, 8)], name="g", grammar=grammar, masked=(6, 7)).sample


def test_scores_of_ranks_are_those_of_one_under_grammars_too(pair, group, make_credited, family, tiny_folder):
    ours, _, reference, ranks = pair
    samples = [one.sample for one in family(20, temperature=0.7)]
    samples.append(constrained(GrammarFactory.from_folder(tiny_folder["llama"]), make_credited))
    update_policy(ours, family(9), AlgorithmConfig(), ranks=ranks)
    for scorer, of_reference in ((ours.scorer, False), (reference, True)):
        alone = scorer.score(samples)
        together = ranks.score("policy", scorer, samples, reference=of_reference)
        assert [a.keys() for a in together] == [a.keys() for a in alone]
        assert all(a[t] == pytest.approx(b[t], abs=2e-5) for a, b in zip(together, alone, strict=True) for t in b)
        group.send([ScoreOrder("policy", of_reference, tuple(samples))] * 2)
        assert group.meet() == [alone, alone]  # bit for bit: each rank has the weights of the driver
    assert alone != ours.scorer.score(samples)


def test_a_rank_without_samples_scores_none(pair, family):
    ours, _, _, ranks = pair
    (one,) = family(1)
    assert ranks.score("policy", ours.scorer, [one.sample], reference=False) == ours.scorer.score([one.sample])


def trained(ids: list[int], part: str, name: str) -> Sample:
    """A sample whose last token is sampled."""
    reasons = (*(MaskReason.PROMPT,) * (len(ids) - 1), None)
    blank, spans = (0.0,) * len(ids), (Span(len(ids) - 1, len(ids), 0, 1.0, None),)
    held = {"behaviour": blank, "constrained": (False,) * len(ids), "spans": spans, "score": Score(1.0)}
    return Sample(name, name, "q", part, part, "policy", 0, tuple(ids), reasons, **held)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.integers(0, 3)), max_size=30),
    st.integers(1, 5),
    st.sampled_from(["tree", "packed", "padded"]),
)
def test_m25_every_sample_is_in_one_share_and_shares_are_even(given_samples, num_ranks, layout):
    samples = [trained([5] * stem + [7 + i] * own, part, f"s{i}") for i, (part, own, stem) in enumerate(given_samples)]
    shares = split(samples, num_ranks, layout)
    assert len(shares) == num_ranks
    assert sorted(i for share in shares for i in share) == list(range(len(samples)))
    assert all(share == sorted(share) for share in shares)
    longest = max((len(s.ids) for s in samples), default=0)
    for part in "ab":
        sums = [sum(len(samples[i].ids) for i in share if samples[i].part == part) for share in shares]
        if layout != "tree":
            assert max(sums) - min(sums) <= 2 * longest
    again = split(samples[::-1], num_ranks, layout)
    assert [{samples[::-1][i].id for i in share} for share in again] == [{samples[i].id for i in s} for s in shares]


def test_samples_that_share_their_beginning_go_to_one_rank():
    samples = [trained([10 + i % 2] * 30 + [40 + i], "a", f"s{i}") for i in range(8)]
    assert split(samples, 2, "tree") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_driver_shares_its_cores_while_all_ranks_compute(group):
    torch.set_num_threads(2)
    ranks = Ranks(group, 1)
    with ranks.computing():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with Ranks().computing():
        assert torch.get_num_threads() == 2
