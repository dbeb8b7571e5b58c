"""Every ablation switch changes what it should, and only that (spec E4)."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.protocols import ToolItem, ToolResult
from agentrl.recipes.mars.config import MarsConfig
from agentrl.recipes.mars.credit import assign
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.setup import samples_of
from agentrl.recipes.session import chosen

REWARDS = [1.0, 0.0, 0.0, 1.0]
DISTILLED = [3, 1, 0, 4]


def credit(lab, **switches):
    return assign(lab.question(REWARDS, DISTILLED), MarsConfig(**switches), seed=1, step=1)


def of(out, role, what="advantages"):
    return [getattr(c, what) for c in out.credited if c.sample.part == role]


@pytest.fixture
def world(roll, lab):
    """The same rollouts under other switches."""
    tool = lab.page_tool("alpha " * 30, "beta " * 60, "gamma " * 60, "delta " * 20)

    def make(**mars):
        return roll(lab.script([lab.call(), lab.ANSWER], "a digest"), [tool], mars=mars)

    return make


def test_e4_without_system_1_the_raw_results_reach_system_2(world):
    on, off = world(), world(system1="off")
    assert on.asked(1)
    assert not off.asked(1)
    assert "alpha alpha" in off.prompts(0)[1]
    assert "alpha alpha" not in on.prompts(0)[1]
    assert off.prompts(0)[0] == on.prompts(0)[0]
    assert off.only.answer == on.only.answer
    assert off.only.counts["tool_calls"] == on.only.counts["tool_calls"] == 1


def test_e4_packing_changes_the_bins_and_nothing_that_system_2_sees_of_them(world):
    ffd, single, truncate = world(), world(packing="single"), world(packing="truncate")
    assert len(single.asked(1)) == 4
    assert len(truncate.asked(1)) == 1
    assert 1 < len(ffd.asked(1)) < 4
    assert [p.count("page ") for p in single.prompts(1)] == [1] * 4
    assert truncate.prompts(1)[0].index("alpha") < truncate.prompts(1)[0].index("beta")
    assert "delta" not in truncate.prompts(1)[0]
    assert truncate.only.counts["truncated_tokens"] > 0 == ffd.only.counts["truncated_tokens"]
    assert ffd.prompts(0)[0] == single.prompts(0)[0] == truncate.prompts(0)[0]


def test_e4_training_one_role_masks_the_other_and_leaves_its_own_credit(roll, lab):
    tool = lab.page_tool("w " * 200, "w " * 200)
    out = roll(lab.script([lab.call(), lab.ANSWER]), [tool], group_size=4)
    by_train = {}
    for train in ("both", "system2", "system1"):
        recipe = lab.recipe({"train": train})
        samples = [
            s for t, r in zip(out.trajectories, REWARDS, strict=True) for s in samples_of(recipe, lab.scored(t, r))
        ]
        by_train[train] = assign(samples, recipe.mars, seed=1, step=1)
    for role, train, other in ((SYSTEM2, "system2", SYSTEM1), (SYSTEM1, "system1", SYSTEM2)):
        assert of(by_train[train], role) == of(by_train["both"], role)
        assert of(by_train[train], role, "weights") == of(by_train["both"], role, "weights")
        assert all(not any(w) for w in of(by_train[train], other, "weights"))
        assert any(any(w) for w in of(by_train["both"], other, "weights"))


def test_e4_without_balancing_every_system_1_sample_counts_once(lab):
    base, none = credit(lab), credit(lab, balance="none")
    assert [n for c, n in zip(none.credited, none.copies, strict=True) if c.sample.part == SYSTEM1] == [1.0] * 8
    assert sum(n for c, n in zip(base.credited, base.copies, strict=True) if c.sample.part == SYSTEM1) == 4
    assert of(none, SYSTEM1) == of(base, SYSTEM1)
    assert of(none, SYSTEM2, "weights") == of(base, SYSTEM2, "weights")


def test_e4_weighted_draws_change_the_copies_alone(lab):
    base, weighted = credit(lab), credit(lab, balance="weighted")
    assert of(weighted, SYSTEM1) == of(base, SYSTEM1)
    assert of(weighted, SYSTEM2, "weights") == of(base, SYSTEM2, "weights")
    assert sum(weighted.copies) == sum(base.copies)


def test_e4_sampling_before_normalising_changes_system_1_s_statistics_alone(lab):
    base, first = credit(lab), credit(lab, sample_first=True)
    assert first.copies == base.copies
    assert of(first, SYSTEM2) == of(base, SYSTEM2)
    assert of(first, SYSTEM1) != of(base, SYSTEM1)
    kept = [(c, n) for c, n in zip(first.credited, first.copies, strict=True) if c.sample.part == SYSTEM1 and n]
    assert sum(c.advantages[-1] * n for c, n in kept) == pytest.approx(0, abs=1e-5)


def test_e4_joint_normalisation_changes_both_roles_advantages_and_no_weight(lab):
    base, joint = credit(lab), credit(lab, normalise="joint")
    assert of(joint, SYSTEM2) != of(base, SYSTEM2)
    assert of(joint, SYSTEM1) != of(base, SYSTEM1)
    winners = {c.advantages[-1] for c in joint.credited if c.sample.score.value == 1.0}
    assert len(winners) == 1
    assert joint.copies == base.copies
    assert [c.weights for c in joint.credited] == [c.weights for c in base.credited]


def test_e4_token_means_change_weights_alone(lab):
    samples = [lab.sample(SYSTEM2, 1.0, trained=3), lab.sample(SYSTEM2, 0.0, rollout=1, trained=9)]
    a, b = (assign(samples, MarsConfig(loss_mean=m), seed=1, step=1) for m in ("sequence", "token"))
    assert [c.advantages for c in a.credited] == [c.advantages for c in b.credited]
    assert [sum(c.weights) for c in a.credited] == pytest.approx([0.5, 0.5])
    assert [sum(c.weights) for c in b.credited] == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("off", ["search", "python"])
def test_e4_a_tool_that_is_off_is_neither_shown_nor_executed(roll, lab, off):
    tools = {n: lab.tool(lambda _: ToolResult((ToolItem("p", "page"),)), n) for n in ("search", "python")}
    listed = tuple(n for n in tools if n != off)
    recipe = lab.recipe(
        tools={"custom": dict.fromkeys(tools, "nowhere:tool")}, agents={SYSTEM2: {"max_turns": 2, "tools": listed}}
    )
    assert recipe.system2_tools == listed
    use = chosen(tools, recipe.system2_tools)
    out = roll(
        lab.script([lab.call(name=off), lab.call(name=listed[0]), lab.ANSWER]), list(use.values()), recipe=recipe
    )
    assert out.only.status == "ok"
    assert tools[off].seen == []
    assert len(tools[listed[0]].seen) == 1
    assert out.only.turns[0].observation.error == "unknown_tool"
    assert f'"name": "{off}"' not in out.prompts(0)[0]
    everything = lab.recipe(tools={"custom": dict.fromkeys(tools, "nowhere:tool")})
    assert everything.system2_tools == ("python", "search")


def test_a_tool_that_is_listed_but_not_set_up_is_refused(lab):
    with pytest.raises((ConfigError, ValueError), match="not set up"):
        lab.recipe(agents={SYSTEM2: {"tools": ("web",)}})
