"""What is trained of a rollout, with real chat templates (spec M1, M3, M4)."""

from __future__ import annotations

import pytest

from agentrl.recipes.mars.credit import assign
from agentrl.recipes.mars.metrics import masked_tokens, untrained_reason
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.types import MaskReason, Trajectory

SYNTAXES = ["hermes", "tag"]


@pytest.fixture
def rollouts(roll, lab, template):
    """Three rollouts in a syntax: errors, several bins, a direct answer; with thinking where the template has it."""

    def make(syntax: str):
        thinking = "<think>\nI wonder.\n</think>\n\n" if template == "thinking" else ""
        call = lab.call() if syntax == "hermes" else "<search>river | where it is</search>"
        broken = lab.call(purpose=None) if syntax == "hermes" else "<search>river</search>"
        lines = {0: [call, broken, call, lab.ANSWER], 1: ["no call", call, lab.ANSWER], 2: [lab.ANSWER]}

        def think(request, prompt):
            mine = lines[request.key.g]
            return thinking + mine[min(request.key.turn, len(mine) - 1)]

        tool = lab.page_tool(*("w " * 180 for _ in range(5)))
        return roll(
            lab.script(think, lambda r, _: f"digest {r.key.bin} </search> <|im_end|> more"),
            [tool],
            mars={"call_syntax": syntax},
            template=template,
            group_size=3,
        )

    return make


def sampled(t: Trajectory, agent: str) -> list[tuple[int, ...]]:
    return [turn.action.completion.ids for turn in t.turns if turn.action.agent == agent]


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_m1_one_system_2_sample_per_rollout_and_one_system_1_sample_per_bin(rollouts, lab, syntax):
    out = rollouts(syntax)
    samples = [s for t in out.trajectories for s in lab.samples(t)]
    assert sum(s.part == SYSTEM2 for s in samples) == 3
    bins = sum(t.counts.get("bins", 0) for t in out.trajectories)
    assert sum(s.part == SYSTEM1 for s in samples) == bins == len(out.asked(1)) > 3
    assert all(s.weight == 1.0 for s in samples)
    whole = max((r for r in out.asked(0) if r.key.g == 0), key=lambda r: r.key)
    first = next(s for s in samples if s.part == SYSTEM2 and s.trajectory_id == out.trajectories[0].id)
    assert first.ids[: len(whole.prompt.ids)] == whole.prompt.ids


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_m3_the_mask_covers_exactly_what_was_sampled_with_its_end_token(rollouts, lab, syntax):
    out = rollouts(syntax)
    for t in out.trajectories:
        for one in lab.samples(t):
            completions = [t.turns[span.turn_index].action.completion for span in one.spans]
            spans = [one.ids[span.start : span.stop] for span in one.spans]
            assert spans == [c.ids for c in completions]
            trained = {i for i, m in enumerate(one.loss_mask) if m}
            assert trained == {i for span in one.spans for i in range(span.start, span.stop)}
            assert one.num_trained == sum(len(c.ids) for c in completions)
            given = {one.reasons[i] for i in range(len(one.ids)) if i not in trained}
            assert given <= {MaskReason.PROMPT, MaskReason.WORLD}
            if one.part == SYSTEM1:
                assert len(one.spans) == 1
                assert one.ids[-1] in out.chat.format.eos_ids  # the sampled end is trained
                assert MaskReason.WORLD not in given
    ends = [t.turns[-1].action.completion.ids[-1] for t in out.trajectories]
    assert all(isinstance(end, int) for end in ends)


def test_m3_an_end_token_the_environment_adds_is_not_trained(roll, lab, template):
    out = roll(lab.script([lab.call(), lab.ANSWER]), [lab.page_tool("page")], template=template)
    (mine,) = [s for s in lab.samples(out.only) if s.part == SYSTEM2]
    first = mine.spans[0]
    # The call ended at its closing tag, so the end of turn that follows is the environment's.
    assert out.chat.format.sampled_end(mine.ids[first.start : first.stop]) == 0
    assert mine.reasons[first.stop] is MaskReason.WORLD
    own = roll(
        lab.script([lab.call(), lab.ANSWER]), [lab.page_tool("page")], template=template, mars={"stop_at_tags": False}
    )
    (mine,) = [s for s in lab.samples(own.only) if s.part == SYSTEM2]
    first = mine.spans[0]
    assert mine.ids[first.stop - 1] in own.chat.format.eos_ids
    assert mine.reasons[first.stop - 1] is None


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("reward", [1.0, None])
def test_m4_trained_and_masked_tokens_are_all_that_were_sampled(rollouts, lab, syntax, reward):
    out = rollouts(syntax)
    samples = [s for t in out.trajectories for s in lab.samples(t, reward)]
    everything = sum(len(ids) for t in out.trajectories for a in (SYSTEM1, SYSTEM2) for ids in sampled(t, a))
    trained = {role: sum(s.num_trained for s in samples if s.part == role) for role in (SYSTEM1, SYSTEM2)}
    masked = masked_tokens(assign(samples, out.recipe.mars, seed=0, step=1))
    assert trained[SYSTEM1] + trained[SYSTEM2] + sum(masked.values()) == everything
    assert (sum(masked.values()) == 0) == (reward is not None)
    places = [(s.trajectory_id, span.turn_index) for s in samples for span in s.spans]
    assert len(places) == len(set(places)) == sum(len(t.turns) for t in out.trajectories)
    assert sum(t.counts["generated_tokens"] for t in out.trajectories) == everything


def test_m4_digests_are_masked_in_system_2_and_trained_in_system_1(rollouts, lab):
    out = rollouts("hermes")
    t = out.trajectories[0]
    mine = next(s for s in lab.samples(t) if s.part == SYSTEM2)
    text = out.chat.format.decode([i for i, m in zip(mine.ids, mine.loss_mask, strict=True) if m])
    world = out.chat.format.decode([i for i, r in zip(mine.ids, mine.reasons, strict=True) if r is MaskReason.WORLD])
    assert "digest 0" in world
    assert "digest" not in text
    assert "find where it is" in text  # the purpose is System 2's own
    read = next(s for s in lab.samples(t) if s.part == SYSTEM1)
    prompt = out.chat.format.decode([i for i, r in zip(read.ids, read.reasons, strict=True) if r is MaskReason.PROMPT])
    assert "find where it is" in prompt
    assert "w w w" in prompt


def test_f72_a_step_that_trains_nothing_says_why(roll, lab):
    out = roll(lab.script([lab.call(), lab.ANSWER]), [lab.page_tool("page")], group_size=2)

    def reason(rewards, frozen=()):
        samples = [s for t, r in zip(out.trajectories, rewards, strict=True) for s in lab.samples(t, r, frozen)]
        return untrained_reason(assign(samples, out.recipe.mars, seed=0, step=1), kl_coef=0.0)

    tokens = sum(t.counts["generated_tokens"] for t in out.trajectories)
    assert reason([1.0, 0.0]) is None
    assert reason([None, None]) == f"tokens: reward_missing {tokens}; rewards differ in 0 of 1 questions"
    assert reason([1.0, 1.0]) == f"tokens: no advantage {tokens}; rewards differ in 0 of 1 questions"
    both = reason([1.0, 0.0], (SYSTEM1, SYSTEM2))
    assert both == f"tokens: frozen {tokens}; rewards differ in 1 of 1 questions"
    assert reason([1.0, 0.0], (SYSTEM1,)) is None
    assert untrained_reason(assign([], out.recipe.mars, seed=0, step=1), 0.0) == "there are no samples"
