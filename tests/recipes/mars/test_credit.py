"""Who earned what: advantages per question and role, balanced copies, weights (spec 6.2 to 6.4)."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from agentrl.recipes.mars.config import MarsConfig
from agentrl.recipes.mars.credit import assign
from agentrl.recipes.mars.metrics import untrained_reason
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.types import MaskReason


def credit(samples, seed=0, step=1, **switches):
    return assign(samples, MarsConfig(**switches), seed=seed, step=step)


def advantage(one) -> float:
    values = {a for a, t in zip(one.advantages, one.sample.loss_mask, strict=True) if t}
    assert len(values) <= 1
    return values.pop() if values else 0.0


def advantages(out, role, group=None) -> list[float]:
    return [advantage(c) for c in out.credited if c.sample.part == role and group in (None, c.sample.group)]


def copies(out, role, group=None) -> list[float]:
    pairs = zip(out.credited, out.copies, strict=True)
    return [n for c, n in pairs if c.sample.part == role and group in (None, c.sample.group)]


def test_a1_every_system_1_sample_inherits_the_reward_of_its_trajectory(roll, lab):
    tool = lab.page_tool(*("w " * 200 for _ in range(5)))
    out = roll(lab.script([lab.call(), lab.ANSWER]), [tool], group_size=3)
    for k, t in enumerate(out.trajectories):
        samples = lab.samples(t, float(k % 2))
        assert len(samples) > 2
        assert {s.score.value for s in samples} == {float(k % 2)}


@pytest.mark.parametrize(
    ("std", "s2", "s1"),
    [
        ("population", [1, -1, -1, 1], [1.2247, -0.8165, -0.8165, -0.8165, 1.2247]),
        ("unbiased", [0.8660, -0.8660, -0.8660, 0.8660], [1.0954, -0.7303, -0.7303, -0.7303, 1.0954]),
    ],
)
def test_a2_vectors_of_the_spec_and_a_shared_baseline_differs(lab, std, s2, s1):
    samples = lab.question([1, 0, 0, 1], [1, 3, 0, 1])
    out = credit(samples, advantage_std=std, balance="none")
    assert advantages(out, SYSTEM2) == pytest.approx(s2, abs=1e-4)
    assert advantages(out, SYSTEM1) == pytest.approx(s1, abs=1e-4)
    joint = credit(samples, advantage_std=std, balance="none", normalise="joint")
    assert advantages(joint, SYSTEM2) != pytest.approx(s2, abs=1e-2)
    assert advantages(joint, SYSTEM1) != pytest.approx(s1, abs=1e-2)
    assert sum(advantages(joint, SYSTEM2) + advantages(joint, SYSTEM1)) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("std", ["population", "unbiased"])
def test_a3_each_group_and_role_sums_to_zero_with_unit_variance_before_sampling(lab, std):
    rng = random.Random(1)
    for trial in range(60):
        g = rng.choice([2, 4, 16])
        samples = lab.question([float(rng.random() < 0.4) for _ in range(g)], [rng.randrange(5) for _ in range(g)])
        out = credit(samples, step=trial, advantage_std=std)
        for role in (SYSTEM2, SYSTEM1):
            values = advantages(out, role)
            if not values:
                continue
            rewards = {c.sample.score.value for c in out.credited if c.sample.part == role}
            assert abs(sum(values)) < 1e-4
            count = len(values) - (std == "unbiased")
            expected = 1.0 if len(rewards) > 1 else 0.0
            assert sum(v * v for v in values) / max(1, count) == pytest.approx(expected, abs=1e-4)


def test_a4_system_1_statistics_are_those_of_all_forty_not_of_the_sixteen_kept(lab):
    rewards = [1.0] * 4 + [0.0] * 12
    distilled = [7] * 4 + [1] * 12
    out = credit(lab.question(rewards, distilled), advantage_std="population")
    p = 28 / 40
    expected = {round(math.sqrt((1 - p) / p), 4), round(-math.sqrt(p / (1 - p)), 4)}
    assert {round(a, 4) for a in advantages(out, SYSTEM1)} == expected
    assert sum(copies(out, SYSTEM1)) == 16


def test_a5_balancing_leaves_advantages_untouched(lab):
    rng = random.Random(4)
    for trial in range(40):
        samples = lab.question([float(rng.random() < 0.5) for _ in range(6)], [rng.randrange(6) for _ in range(6)])
        drawn, all_of_them = credit(samples, seed=trial), credit(samples, balance="none")
        assert [c.advantages for c in drawn.credited] == [c.advantages for c in all_of_them.credited]


def test_a6_the_number_of_system_1_samples_leaves_system_2_alone(lab):
    rewards = [1, 0, 0, 1, 0]
    base = advantages(credit(lab.question(rewards, [1, 1, 1, 1, 1])), SYSTEM2)
    for distilled in ([0] * 5, [9, 0, 0, 0, 0], [0, 0, 7, 1, 2]):
        assert advantages(credit(lab.question(rewards, distilled)), SYSTEM2) == base


@pytest.mark.parametrize("m", [1, 2, 3, 15, 16, 17, 33, 160, 320])
def test_a7_balancing_ends_at_exactly_g(lab, m):
    distilled = [m // 16 + (k < m % 16) for k in range(16)]
    out = credit(lab.question([1.0, 0.0] * 8, distilled))
    assert sum(copies(out, SYSTEM1)) == 16
    assert copies(out, SYSTEM2) == [1.0] * 16


def test_a7_without_tools_there_is_no_system_1_term(lab):
    out = credit(lab.question([1, 0], [0, 0]) + lab.question([1, 0], [2, 1], group="r"))
    assert copies(out, SYSTEM1, "q") == []
    assert sum(copies(out, SYSTEM1, "r")) == 2


def test_a8_a_draw_down_is_uniform_without_duplicates_and_blind_to_the_advantage(lab):
    samples = lab.question([1, 0, 0, 0], [2, 4, 3, 1])
    counts: Counter[int] = Counter()
    draws = 4000
    for step in range(draws):
        kept = copies(credit(samples, step=step), SYSTEM1)
        assert set(kept) <= {0.0, 1.0}
        counts.update(i for i, n in enumerate(kept) if n)
    expected, sigma = draws * 0.4, math.sqrt(draws * 0.4 * 0.6)
    assert all(abs(counts[i] - expected) < 4 * sigma for i in range(10))
    weighted = Counter()
    for step in range(800):
        kept = copies(credit(samples, step=step, balance="weighted"), SYSTEM1)
        weighted.update(i for i, n in enumerate(kept) if n)
    assert min(weighted[0], weighted[1]) > 1.3 * max(weighted[i] for i in range(2, 10))


def test_a9_a_draw_up_keeps_every_original_and_copies_differ_by_at_most_one(lab):
    for step in range(50):
        kept = copies(credit(lab.question([1, 0] * 8, [1, 0, 2, 0] * 3 + [0] * 4), step=step), SYSTEM1)
        assert min(kept) >= 1
        assert max(kept) - min(kept) <= 1
        assert sum(kept) == 16


def test_a10_draws_never_cross_questions_and_follow_the_seed(lab):
    samples = [s for q in "abc" for s in lab.question([1, 0, 1, 0], [5, 4, 3, 2], group=q)]
    out = credit(samples, seed=3)
    assert [sum(copies(out, SYSTEM1, q)) for q in "abc"] == [4, 4, 4]
    assert credit(samples, seed=3).copies == out.copies
    assert credit(samples, seed=4).copies != out.copies
    assert credit(samples, seed=3, step=2).copies != out.copies
    alone = credit([s for s in samples if s.group == "b"], seed=3)
    assert list(alone.copies) == [n for c, n in zip(out.credited, out.copies, strict=True) if c.sample.group == "b"]


def test_a11_the_mean_advantage_of_those_kept_is_unbiased(lab):
    samples = lab.question([1, 0, 0, 0], [3, 4, 2, 5])
    means = []
    for step in range(3000):
        out = credit(samples, step=step)
        pairs = zip(advantages(out, SYSTEM1), copies(out, SYSTEM1), strict=True)
        means.append(sum(a * n for a, n in pairs) / 4)
    mean = sum(means) / len(means)
    spread = math.sqrt(sum((m - mean) ** 2 for m in means) / len(means) / len(means))
    assert abs(mean) < 4 * spread


def test_a12_groups_without_signal_have_advantage_zero_and_no_nan(lab):
    for rewards in ([1, 1, 1], [0, 0, 0]):
        out = credit(lab.question(rewards, [1, 2, 0]))
        assert set(advantages(out, SYSTEM2) + advantages(out, SYSTEM1)) == {0.0}
        assert out.metrics["groups/zero_variance"] == out.metrics["mars/zero_variance_s1"] == 1.0
    lone = credit(lab.question([1, 0], [1, 0]))
    assert advantages(lone, SYSTEM1) == [0.0]
    assert lone.metrics["groups/zero_variance"] == 0.0
    assert lone.metrics["mars/zero_variance_s1"] == 1.0
    everything = [x for out in (lone,) for c in out.credited for x in (*c.advantages, *c.weights)]
    assert all(math.isfinite(x) for x in everything)


def test_a12_system_1_may_be_flat_where_system_2_is_not(lab):
    out = credit(lab.question([1, 0, 0, 1], [0, 2, 1, 0]))
    assert set(advantages(out, SYSTEM1)) == {0.0}
    assert set(advantages(out, SYSTEM2)) != {0.0}


def test_f11_grouping_follows_ids_not_positions(lab):
    rng = random.Random(9)
    samples = [s for q in "abcd" for s in lab.question([1, 0, rng.random() < 0.5, 0], [2, 3, 0, 1], group=q)]
    base = {c.sample.id: (c.advantages, c.weights) for c in credit(samples).credited}
    for _ in range(20):
        rng.shuffle(samples)
        out = credit(samples)
        assert [c.sample for c in out.credited] == samples
        mixed = {c.sample.id: (c.advantages, c.weights) for c in out.credited}
        assert {k: v[0] for k, v in mixed.items()} == {k: v[0] for k, v in base.items()}
        assert all(mixed[k][1] == pytest.approx(base[k][1], rel=1e-12) for k in base)


def test_f2_missing_rewards_leave_the_statistics_of_the_rest(lab):
    none = credit(lab.question([1, 0, 0], [1, 2, 1]))
    one = credit(lab.question([1, 0, 0, None], [1, 2, 1, 3]))
    assert advantages(one, SYSTEM2)[:3] == advantages(none, SYSTEM2)
    lost = [c for c in one.credited if c.sample.score.missing]
    assert len(lost) == 4
    assert all(set(c.advantages) | set(c.weights) == {0.0} for c in lost)
    assert sum(copies(one, SYSTEM1)) == 3
    assert one.metrics["mars/s2_samples"] == 3
    weights = [sum(c.weights) for c in one.credited if c.sample.part == SYSTEM2]
    assert weights == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_f2_a_question_with_fewer_than_two_rewards_is_skipped(lab):
    rest = lab.question([1, 0], [1, 1], group="r")
    alone = credit(rest)
    for rewards in ([1.0] + [None] * 7, [None] * 8):
        out = credit(lab.question(rewards, [2] * 8) + rest)
        assert out.metrics["groups/skipped"] == 1
        assert out.metrics["groups/zero_variance"] == 0.0
        gone = [c for c in out.credited if c.sample.group == "q"]
        assert all(set(c.weights) == {0.0} for c in gone)
        assert [c.weights for c in out.credited if c.sample.group == "r"] == [c.weights for c in alone.credited]
        assert all(math.isfinite(x) for c in out.credited for x in (*c.advantages, *c.weights))


def test_an_empty_step_is_no_fault():
    out = credit([])
    assert out.credited == ()
    assert out.metrics["groups/zero_variance"] is None
    assert out.metrics["mars/s1_over_g"] is None


def test_f3_a_flat_group_counts_in_the_mean_and_batch_statistics_do_not_leak(lab):
    mixed = lab.question([1, 0], [0, 0]) + lab.question([1, 1], [0, 0], group="flat")
    out = credit(mixed)
    assert advantages(out, SYSTEM2, "flat") == [0.0, 0.0]
    assert advantages(out, SYSTEM2, "q") == advantages(credit(lab.question([1, 0], [0, 0])), SYSTEM2)
    assert [sum(c.weights) for c in out.credited] == pytest.approx([0.25] * 4)


def test_f8_every_trained_token_of_unequal_turns_has_its_trajectory_s_advantage(roll, lab):
    tool = lab.page_tool("page")
    thoughts = ["a " * 3, "b " * 40, "c " * 11]

    def think(request, prompt):
        turn = request.key.turn
        return thoughts[turn] + lab.call() if turn < 3 else lab.ANSWER

    out = roll(lab.script(think), [tool], group_size=3)
    rewards = [1.0, 0.0, 0.0]
    samples = [s for t, r in zip(out.trajectories, rewards, strict=True) for s in lab.samples(t, r)]
    result = credit(samples, advantage_std="population")
    expected = {1.0: math.sqrt(2), 0.0: -math.sqrt(0.5)}
    for one in result.credited:
        trained = [t for span in one.sample.spans for t in range(span.start, span.stop)]
        assert [one.advantages[t] for t in trained] == pytest.approx(
            [expected[one.sample.score.value]] * len(trained), abs=1e-4
        )
        assert {a for t, a in enumerate(one.advantages) if t not in trained} == {0.0}
        assert one.sample.part == SYSTEM1 or all(one.weights[t] > 0 for t in trained)
    assert any(len(c.sample.spans) == 4 for c in result.credited)


def test_f10_rollouts_of_unequal_length_make_one_sample_each(roll, lab):
    tool = lab.page_tool("page")
    script = lab.script(lambda r, _: lab.call() if r.key.turn < r.key.g else lab.ANSWER)
    out = roll(script, [tool], group_size=5)
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    samples = [s for t, r in zip(out.trajectories, rewards, strict=True) for s in lab.samples(t, r)]
    assert sum(s.part == SYSTEM2 for s in samples) == 5
    assert len({s.group for s in samples}) == 1
    result = credit(samples)
    assert sum(advantages(result, SYSTEM2)) == pytest.approx(0, abs=1e-5)
    assert sorted(len(s.spans) for s in samples if s.part == SYSTEM2) == [1, 2, 3, 4, 5]
    totals = [sum(c.weights) for c in result.credited if c.sample.part == SYSTEM2]
    assert totals == pytest.approx([1 / 5] * 5)


def test_l1_sequence_means_give_zero_where_token_means_give_the_vector_of_the_spec(lab):
    won, lost = lab.sample(SYSTEM2, 1.0, trained=2), lab.sample(SYSTEM2, 0.0, rollout=1, trained=8)

    def loss(**switches) -> float:
        out = credit([won, lost], advantage_std="population", advantage_eps=0.0, **switches)
        return -sum(a * w for c in out.credited for a, w in zip(c.advantages, c.weights, strict=True))

    assert loss() == pytest.approx(0.0)
    assert loss(loss_mean="token") == pytest.approx(0.6)


def test_l5_each_role_has_a_mean_of_its_own_whatever_the_other_s_size(lab):
    def totals(distilled) -> dict[str, float]:
        out = credit(lab.question([1, 0, 1, 0], distilled), balance="none")
        return {r: sum(sum(c.weights) for c in out.credited if c.sample.part == r) for r in (SYSTEM2, SYSTEM1)}

    assert totals([1, 1, 1, 1]) == pytest.approx({SYSTEM2: 1.0, SYSTEM1: 1.0})
    assert totals([9, 0, 4, 2]) == pytest.approx({SYSTEM2: 1.0, SYSTEM1: 1.0})
    assert totals([0, 0, 0, 0]) == pytest.approx({SYSTEM2: 1.0, SYSTEM1: 0.0})


def test_l5_a_system_1_set_twice_as_large_leaves_the_loss_as_it_is(lab):
    def loss(times: int) -> float:
        """The surrogate of samples whose ratio depends on their rollout, so that it is not 0 by symmetry."""
        samples = lab.question([1, 0, 0], [1 * times, 2 * times, 0], trained=3)
        out = credit(samples, balance="none", advantage_std="population", advantage_eps=0.0)
        ratio = {"q-0": 1.0, "q-1": 1.1, "q-2": 0.9}
        return -sum(
            a * w * ratio[c.sample.trajectory_id]
            for c in out.credited
            for a, w in zip(c.advantages, c.weights, strict=True)
        )

    assert loss(1) == pytest.approx(loss(2))
    assert loss(1) != pytest.approx(0.0)


def test_copies_weigh_as_rows_would(lab):
    out = credit(lab.question([1, 0, 1, 0], [1, 1, 1, 0]))
    kept = [(c, n) for c, n in zip(out.credited, out.copies, strict=True) if c.sample.part == SYSTEM1]
    assert sorted(n for _, n in kept) == [1.0, 1.0, 2.0]
    for one, n in kept:
        assert [w for w in one.weights if w] == pytest.approx([n / (4 * 2)] * 2)


def test_a_masked_role_keeps_the_baseline_and_the_draw_of_the_other(lab):
    open_, frozen = lab.question([1, 0, 0, 1], [3, 2, 4, 1]), []
    for s in open_:
        reason = MaskReason.FROZEN if s.part == SYSTEM2 else None
        k, place = int(s.trajectory_id[-1]), int(s.id[-3:])
        frozen.append(lab.sample(s.part, s.score.value, rollout=k, place=place, reason=reason))
    for switches in ({}, {"normalise": "joint"}, {"train": "system1"}):
        a, b = credit(open_, **switches), credit(frozen, **switches)
        assert advantages(a, SYSTEM1) == advantages(b, SYSTEM1)
        assert a.copies == b.copies
        assert sum(copies(b, SYSTEM1)) == 4
        assert all(set(c.weights) == {0.0} for c in b.credited if c.sample.part == SYSTEM2)
        assert sum(sum(c.weights) for c in b.credited) == pytest.approx(1.0)


def test_a_role_that_used_no_tool_in_some_rollouts_is_still_drawn_to_g(lab):
    out = credit(lab.question([1, 0, 0, 1], [3, 0, 0, 0]), train="system1")
    assert sum(copies(out, SYSTEM1)) == 4


def test_f7_one_rollout_per_question_has_no_baseline_and_trains_nothing(lab):
    out = credit(lab.question([1.0], [3]))
    assert all(set(c.weights) == {0.0} for c in out.credited)


def test_f3_with_a_kl_term_a_flat_group_still_has_weight_and_is_not_called_untrained(lab):
    out = credit(lab.question([1, 1], [1, 1]))
    assert untrained_reason(out, kl_coef=0.1) is None
    assert "no advantage 8" in untrained_reason(out, kl_coef=0.0)
    assert sum(sum(c.weights) for c in out.credited) == pytest.approx(2.0)


def test_f3_a_reward_that_is_not_a_number_is_refused_also_inside_a_constant_group(lab):
    with pytest.raises(ValueError, match="finite"):
        credit(lab.question([1, 1, float("nan")], [0, 0, 0]))
