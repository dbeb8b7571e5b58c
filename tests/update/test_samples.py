"""Trajectories become samples: one per context, every sampled token once, masked ones with a reason."""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.types import (
    Action,
    Completion,
    Grammar,
    Key,
    MaskReason,
    Prompt,
    Request,
    Sampling,
    Score,
    ScoredTrajectory,
    Task,
    Trajectory,
    Turn,
)
from agentrl.update.samples import chains, to_samples


def _turn(prompt, sampled, *, agent="s2", turn=0, parent=None, version=0, grammar=None, forced=(), temperature=1.0):
    n = len(sampled)
    completion = Completion(
        ids=tuple(sampled),
        logprobs=tuple(-0.1 * (turn + 1) - 0.01 * t for t in range(n)),
        constrained=(grammar is not None,) * n,
        forced=tuple(t in forced for t in range(n)),
        finish_reason="stop",
        policy_version=version,
    )
    key = Key("train", 1, "q", 0, turn, 0)
    sampling = Sampling(temperature=temperature, grammar=grammar)
    return Turn(
        Action(agent, Request("p", Prompt.of(prompt), sampling, key), completion, ""), None, turn, 0, parent=parent
    )


def _scored(turns, *, outcome=1.0, status="ok"):
    trajectory = Trajectory("t", Task("q", "?"), 0, tuple(turns), None, status)
    return ScoredTrajectory(trajectory, Score(outcome, None if outcome is not None else "judge"), (None,) * len(turns))


def _samples(scored, *, frozen=(), constrained="allowed", **options):
    fate = lambda agent: MaskReason.FROZEN if agent in frozen else None  # noqa: E731
    return to_samples(scored, part_of=str.upper, fate_of=fate, constrained=constrained, **options)


# A conversation of three turns of unequal length (1, 4 and 2 tokens), with the world between.
FIRST = ([1, 2, 3], [10])
SECOND = ([1, 2, 3, 10, 4, 5], [11, 12, 13, 14])
THIRD = ([1, 2, 3, 10, 4, 5, 11, 12, 13, 14, 6], [15, 16])


def _conversation(**options):
    return [_turn(*pair, turn=i, **options) for i, pair in enumerate((FIRST, SECOND, THIRD))]


def test_turns_of_unequal_length_are_one_sample_and_each_keeps_its_own_tokens():
    (sample,) = _samples(_scored(_conversation()))
    assert sample.ids == (1, 2, 3, 10, 4, 5, 11, 12, 13, 14, 6, 15, 16)
    prompt, world = MaskReason.PROMPT, MaskReason.WORLD
    assert sample.reasons == (prompt,) * 3 + (None, world, world) + (None,) * 4 + (world, None, None)
    assert [(s.start, s.stop, s.turn_index) for s in sample.spans] == [(3, 4, 0), (6, 10, 1), (11, 13, 2)]
    for span in sample.spans:
        expected = [-0.1 * (span.turn_index + 1) - 0.01 * t for t in range(span.stop - span.start)]
        assert list(sample.behaviour[span.start : span.stop]) == expected
    assert sum(b != 0.0 for b in sample.behaviour) == 7
    assert (sample.weight, sample.num_trained, sample.part, sample.score.value) == (1.0, 7, "S2", 1.0)


def test_interleaved_agents_keep_their_own_contexts():
    other = [_turn([1, 2, 3], [20], agent="b"), _turn([1, 2, 3, 20, 7], [21, 22], agent="b", turn=1)]
    mine = _conversation()
    turns = [mine[0], other[0], mine[1], other[1], mine[2]]
    assert [(c.agent, c.turn_indices) for c in chains(turns)] == [("s2", (0, 2, 4)), ("b", (1, 3))]
    first, second = _samples(_scored(turns))
    assert (first.agent, second.agent) == ("s2", "b")
    assert second.ids == (1, 2, 3, 20, 7, 21, 22)
    assert [s.turn_index for s in second.spans] == [1, 3]


def test_two_agents_with_equal_prompts_do_not_mix():
    turns = [_turn([1, 2], [3], agent="a"), _turn([1, 2, 3, 4], [5], agent="b", turn=1)]
    assert len(chains(turns)) == 2


def test_stateless_calls_are_samples_of_weight_one_each():
    turns = [_conversation()[0]]
    turns += [_turn([50, 51 + bin], [60, 61], agent="s1", parent=0) for bin in range(3)]
    samples = _samples(_scored(turns))
    assert [s.weight for s in samples] == [1.0] * 4
    assert [s.ids[:2] for s in samples[1:]] == [(50, 51), (50, 52), (50, 53)]


def test_equal_calls_are_two_samples():
    assert len(_samples(_scored([_turn([5, 6], [7, 8], parent=0), _turn([5, 6], [7, 8], parent=0)]))) == 2


def test_a_rerendered_context_splits_into_pieces_that_share_weight_one():
    again = [1, 2, 3, 9, 4, 5]  # the template wrote token 10 another way
    turns = [_turn(*FIRST), _turn(again, [11, 12], turn=1), _turn([*again, 11, 12, 6], [15], turn=2)]
    first, second = _samples(_scored(turns))
    assert [first.weight, second.weight] == [0.5, 0.5]
    assert [len(s.spans) for s in (first, second)] == [1, 2]
    assert second.reasons[:6] == (MaskReason.PROMPT,) * 6
    assert [s.weight for s in _samples(_scored(turns), conversations=False)] == [1.0, 1.0]


def test_a_branch_starts_a_sample_and_trains_no_token_twice():
    turns = [_turn(*FIRST), _turn([1, 2, 3, 10, 4], [11], turn=1), _turn([1, 2, 3, 10, 5], [12], turn=1)]
    first, second = _samples(_scored(turns))
    assert (first.num_trained, second.num_trained) == (2, 1)
    assert second.reasons[3] is MaskReason.PROMPT


def test_a_turn_joins_the_longest_context_that_it_continues():
    turns = [_turn([1], [2]), _turn([1, 2, 3], [4], turn=1), _turn([1, 2], [3, 4, 5], turn=1)]
    turns.append(_turn([1, 2, 3, 4, 5, 6], [7], turn=2))  # 5 is sampled in the third turn, unknown to the second
    assert [c.turn_indices for c in chains(turns)] == [(0, 1), (2, 3)]


def test_a_turn_with_nothing_from_the_world_between_continues_its_context():
    (chain,) = chains([_turn([1, 2], [3]), _turn([1, 2, 3], [4], turn=1)])
    assert chain.turn_indices == (0, 1)


@pytest.mark.parametrize(
    ("options", "scored", "reason"),
    [
        ({"frozen": ("s2",)}, {}, MaskReason.FROZEN),
        ({"frozen": ("s2",)}, {"outcome": None}, MaskReason.FROZEN),
        ({}, {"outcome": None}, MaskReason.REWARD_MISSING),
        ({}, {"outcome": None, "status": "failed"}, MaskReason.FAILED),
        ({}, {"outcome": 0.0}, None),
        ({}, {"outcome": 0.0, "status": "turn_limit"}, None),
    ],
)
def test_the_fate_of_a_trajectory_masks_all_that_was_sampled(options, scored, reason):
    (sample,) = _samples(_scored(_conversation(), **scored), **options)
    sampled = [t for span in sample.spans for t in range(span.start, span.stop)]
    assert {sample.reasons[t] for t in sampled} == {reason}
    assert all(sample.reasons[t] in (MaskReason.PROMPT, MaskReason.WORLD) for t in set(range(13)) - set(sampled))


def test_freezing_one_agent_leaves_the_others_trained():
    turns = [*_conversation(), _turn([1, 2], [3, 4], agent="b", turn=3)]
    first, second = _samples(_scored(turns), frozen=("b",))
    assert (first.num_trained, second.num_trained) == (7, 0)


@pytest.mark.parametrize(
    ("constrained", "reasons"),
    [
        ("allowed", [None, MaskReason.FORCED, None]),
        ("full", [None, MaskReason.FORCED, None]),
        ("mask", [MaskReason.CONSTRAINED, MaskReason.FORCED, MaskReason.CONSTRAINED]),
    ],
)
def test_grammar_tokens_are_masked_as_asked_and_forced_ones_always(constrained, reasons):
    grammar = Grammar("regex", "x")
    turns = [_turn([1], [5, 6, 7], grammar=grammar, forced=(1,)), _turn([1, 5, 6, 7, 2], [8], turn=1, temperature=0.5)]
    (sample,) = _samples(_scored(turns), constrained=constrained)
    assert list(sample.reasons[1:4]) == reasons
    assert sample.reasons[5] is None  # a turn without a grammar
    assert sample.constrained == (False, True, True, True, False, False)
    assert [(s.grammar, s.temperature) for s in sample.spans] == [(grammar, 1.0), (None, 0.5)]


@pytest.mark.parametrize("constrained", ["allowed", "mask"])
def test_m4_trained_and_counted_tokens_are_all_that_were_sampled(constrained):
    grammar = Grammar("regex", "x")
    turns = [
        _turn([1], [5, 6, 7], grammar=grammar, forced=(1,)),
        *[_turn([50 + b], [60, 61], agent="s1", turn=0, parent=0) for b in range(2)],
        _turn([1, 5, 6, 7, 2], [8, 9], turn=1),
    ]
    samples = _samples(_scored(turns), constrained=constrained, frozen=("s1",))
    sampled = Counter()
    for sample in samples:
        for span in sample.spans:
            ids = turns[span.turn_index].action.completion.ids
            assert sample.ids[span.start : span.stop] == ids
            sampled.update((span.turn_index, t) for t in range(len(ids)))
    assert set(sampled.values()) == {1}
    assert len(sampled) == sum(len(t.action.completion.ids) for t in turns)
    counts = Counter(r for s in samples for r in s.reasons)
    given = counts.pop(MaskReason.PROMPT) + counts.pop(MaskReason.WORLD)
    assert given == 1 + 1 + 2
    assert sum(counts.values()) == len(sampled)


def test_one_context_under_two_policy_versions_is_a_fault():
    with pytest.raises(AssertionError, match=r"versions \[0, 1\]"):
        _samples(_scored([_turn(*FIRST), _turn(*SECOND, turn=1, version=1)]))
