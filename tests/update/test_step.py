"""One update: what it trains, what it leaves alone, and that no split of the batch changes it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DivergedError
from agentrl.models import load_model
from agentrl.recipes.mars.config import MarsConfig
from agentrl.recipes.mars.credit import assign
from agentrl.rollout.engine import load_hf_policy
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf import HFEngine
from agentrl.types import Grammar, Key, MaskReason, Prompt, Request, Sampling, Score
from agentrl.update.step import has_effect, update_policy

PLAIN = AlgorithmConfig()


def _grads(policy, credited, algorithm=PLAIN, **options):
    """The accumulated gradient of an update that moves nothing (rate 0, no clipping)."""
    update_policy(policy, credited, algorithm, **options)
    return {n: g.clone() for n, g in policy.grads.items()}


def _distance(a, b):
    """Relative difference of two gradients as wholes."""
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return (difference / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5


def _shape(policy, layout, capacity):
    policy.scorer.layout, policy.scorer.capacity = layout, capacity


def _logprobs(policy, credited):
    return policy.scorer.score([c.sample for c in credited])


# How the batch is split


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_l7_rows_micro_batches_and_layouts_give_one_gradient(make_policy, family, arch):
    policy, credited = make_policy(arch), family(64, temperature=0.8)
    _shape(policy, "padded", 1)  # 64 rows of one sample, the plain form
    alone = _grads(policy, credited)
    for layout in ("tree", "packed", "padded"):
        for capacity in (8 * 24, 64 * 24, 37):
            _shape(policy, layout, capacity)
            assert _distance(_grads(policy, credited), alone) < 2e-6


def test_l7_holds_for_bf16_compute_with_fp32_accumulators(make_policy, family):
    policy, credited = make_policy(dtype="bfloat16"), family(64)
    _shape(policy, "padded", 1)
    alone = _grads(policy, credited)
    assert {g.dtype for g in alone.values()} == {torch.float32}
    exact = _grads(make_policy(), credited)
    rounding = _distance(alone, exact)
    for layout in ("tree", "packed", "padded"):
        for capacity in (8 * 24, 64 * 24):
            _shape(policy, layout, capacity)
            assert _distance(_grads(policy, credited), exact) < 1.5 * rounding < 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_order_of_the_samples_changes_no_bit(make_policy, family, dtype):
    policy, credited = make_policy(dtype=dtype), family(20)
    first = _grads(policy, credited)
    second = _grads(policy, random.Random(1).sample(credited, len(credited)))
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_chunk_of_the_head_changes_nothing(make_policy, family, chunk):
    credited = family(12)
    assert _distance(_grads(make_policy(logprob_chunk=chunk), credited), _grads(make_policy(), credited)) < 1e-6


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_gradient_is_that_of_the_plain_loss_by_autograd(tiny_folder, make_policy, family, arch):
    policy, credited = make_policy(arch), family(9, temperature=0.6)
    ours = _grads(policy, credited)
    reference = load_model(tiny_folder[arch], "float32")
    loss = 0.0
    for one in credited:
        logits_TV = reference(torch.tensor([one.sample.ids])).logits[0] / 0.6
        logprobs_TV = logits_TV.log_softmax(-1)
        for t in range(1, len(one.sample.ids)):
            current = logprobs_TV[t - 1, one.sample.ids[t]]
            loss = loss - one.weights[t] * one.advantages[t] * (current - current.detach()).exp()
    loss.backward()
    assert _distance(ours, {n: p.grad for n, p in reference.named_parameters()}) < 1e-5


def test_gradient_checkpointing_changes_nothing_and_switches_no_dropout_on(tiny_folder, make_policy, family, tmp_path):
    import json
    import shutil

    shutil.copytree(tiny_folder["llama"], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text("utf-8"))
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}), "utf-8")
    credited = family(8)
    policy = make_policy(folder=tmp_path / "m", gradient_checkpointing=True)
    assert policy.model.is_gradient_checkpointing
    entered = []
    layer = policy.model.model.layers[0].self_attn
    layer.register_forward_hook(lambda *_: entered.append(torch.is_grad_enabled()))
    assert _distance(_grads(policy, credited), _grads(make_policy(), credited)) < 1e-6
    rows = len(policy.scorer.pack(credited))
    assert len(entered) == 2 * rows  # each layer ran again in the backward pass


# What is trained


def _hidden_gradients(policy, credited):
    """Norm of the loss's gradient at the hidden state of each token, by sample."""
    kept = []

    def keep(_module, _args, output):
        output.last_hidden_state.retain_grad()
        kept.append(output.last_hidden_state)

    _shape(policy, "padded", 1)
    handle = policy.model.base_model.register_forward_hook(keep)
    order = [
        batch.sample_N[0]
        for part in "ab"
        for batch in policy.scorer.pack([c for c in credited if c.sample.part == part])
    ]
    update_policy(policy, credited, PLAIN)
    handle.remove()
    return order, [h.grad[0].norm(dim=-1).tolist() for h in kept]


def test_m2_m3_the_loss_sees_exactly_the_sampled_tokens(make_policy, family):
    (credited,) = family(1)
    _, (norms,) = _hidden_gradients(make_policy(), [credited])
    trained = [t for t, reason in enumerate(credited.sample.reasons) if reason is None]
    assert [t + 1 for t, norm in enumerate(norms) if norm != 0.0] == trained
    assert len(trained) == sum(span.stop - span.start for span in credited.sample.spans)


def test_m2_values_at_masked_tokens_change_nothing(make_policy, family):
    policy, credited = make_policy(), family(6)
    odd = []
    for one in credited:
        masked = [reason is not None for reason in one.sample.reasons]
        noise = tuple(float("nan") if m else b for m, b in zip(masked, one.sample.behaviour, strict=True))
        advantages = tuple(1e9 if m else a for m, a in zip(masked, one.advantages, strict=True))
        sample = replace(one.sample, behaviour=noise)
        odd.append(replace(one, scored=replace(one.scored, sample=sample), advantages=advantages))
    first, second = _grads(policy, credited), _grads(policy, odd)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_forced_tokens_are_not_trained(make_policy, make_credited):
    ids = [30, 31, 32, 40, 41, 42]
    policy = make_policy()
    masked = make_credited(ids, [(3, 6)], masked=(4,), weight=2.0)
    result = update_policy(policy, [masked], PLAIN)
    assert result.metrics["tokens/trained"] == 2
    assert result.old[0].keys() == {3, 5}


def test_m5_the_parts_add_up_and_neither_depends_on_the_other(make_policy, family):
    policy, credited = make_policy(), family(18)
    parts = {p: _grads(policy, [c for c in credited if c.sample.part == p]) for p in "ab"}
    blank = [replace(c, weights=(0.0,) * len(c.weights)) if c.sample.part == "b" else c for c in credited]
    without = _grads(policy, blank)
    assert max(float((without[n] - parts["a"][n]).abs().max()) for n in without) <= 1e-6
    result = update_policy(policy, credited, PLAIN, part_stats=True)
    total = {n: g.clone() for n, g in policy.grads.items()}
    assert _distance(total, {n: parts["a"][n] + parts["b"][n] for n in total}) < 1e-5
    flat = {p: torch.cat([g.flatten() for g in parts[p].values()]) for p in "ab"}
    assert result.metrics["grad_norm/a"] == pytest.approx(float(flat["a"].norm()), rel=1e-5)
    assert result.metrics["grad_norm/b"] == pytest.approx(float(flat["b"].norm()), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(flat["a"], flat["b"], dim=0)
    assert result.metrics["grad_cosine"] == pytest.approx(float(cosine), abs=1e-5)
    again = _grads(policy, credited)
    assert all(torch.equal(total[n], again[n]) for n in total)  # statistics change no training


@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_fill_and_sharing_are_shares(make_policy, family, layout):
    policy = make_policy()
    _shape(policy, layout, 256)
    metrics = update_policy(policy, family(24), PLAIN).metrics
    fill, shared = metrics["pack/fill"], metrics["pack/shared"]
    assert fill == 1.0 if layout != "padded" else 0 < fill < 1
    assert 0.3 < shared < 1 if layout == "tree" else shared == 0.0
    assert metrics["tokens/computed"] * fill == pytest.approx(sum(len(c.sample.ids) for c in family(24)) * (1 - shared))


def test_l6_one_optimiser_step_sees_both_parts(make_policy, family):
    policy = make_policy(lr=1e-3)
    result = update_policy(policy, family(9), PLAIN)
    assert {"loss/a", "loss/b", "clip_fraction/a", "clip_fraction/b"} <= result.metrics.keys()
    assert (policy.version, policy.optimizer_steps, result.stats.applied) == (1, 1, True)
    assert result.metrics["loss"] == pytest.approx(result.metrics["loss/a"] + result.metrics["loss/b"])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_l3_a_winning_sample_rises_and_a_losing_one_falls(make_policy, make_credited, sign):
    policy = make_policy(lr=1e-4, weight_decay=0.0)
    credited = [make_credited([30, 31, 32, 40, 41, 42], [(3, 6)], advantage=sign)]
    (before,) = _logprobs(policy, credited)
    update_policy(policy, credited, PLAIN)
    (after,) = _logprobs(policy, credited)
    assert sign * (sum(after.values()) - sum(before.values())) > 1e-3


def test_l3_a_sample_of_masked_tokens_changes_no_weight(make_policy, make_credited):
    policy = make_policy(lr=1e-2)
    before = {n: w.clone() for n, w in policy.compute_weights().items()}
    result = update_policy(policy, [make_credited([30, 31, 32], [(1, 3)], masked=(1, 2))], PLAIN)
    assert (result.stats, policy.version) == (None, 0)
    assert all(torch.equal(before[n], w) for n, w in policy.compute_weights().items())


def _mars_samples(family, rewards, seed=0):
    """Samples of one question: two per trajectory of system 2 and some of system 1."""
    out = []
    for i, (one, reward) in enumerate(zip(family(len(rewards), seed=seed), rewards, strict=True)):
        role = "system1" if i % 3 == 2 else "system2"
        out.append(replace(one.sample, part=role, agent=role, score=Score(reward), trajectory_id=f"t{i // 3}"))
    return out


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a12_groups_without_variance_give_no_gradient_and_no_nan(make_policy, family, reward):
    policy = make_policy(lr=1e-2)
    credit = assign(_mars_samples(family, [reward] * 12), MarsConfig(), seed=0, step=1)
    result = update_policy(policy, credit.credited, PLAIN)
    assert result.metrics["samples/moving"] == 0
    assert result.metrics["loss"] == 0
    assert result.stats is None
    assert all(not g.any() for g in policy.grads.values())
    kept = AlgorithmConfig(kl_coef=0.1)  # with a KL term the samples are computed, and a group still adds nothing
    moved = _grads(make_policy(), credit.credited, kept, reference=make_policy(mode="frozen").scorer)
    assert all(not g.any() for g in moved.values())


def test_l5_duplicating_system_1_wholesale_changes_nothing(make_policy, family):
    samples = _mars_samples(family, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    config = MarsConfig(balance="none", advantage_std="population")
    doubled = samples + [replace(s, id=s.id + "+") for s in samples if s.part == "system1"]
    policy = make_policy()
    once, twice = (_grads(policy, assign(s, config, seed=0, step=1).credited) for s in (samples, doubled))
    assert _distance(twice, once) < 1e-5


# Old, reference and behaviour


def _sampled(engine, arch_prompt, grammar):
    async def main():
        requests = [
            Request(
                "policy",
                Prompt.of([*arch_prompt, 50 + g % 3]),
                Sampling(temperature=0.7, max_tokens=10, grammar=grammar if g % 2 else None),
                Key("train", 1, "t", g, 0, 0),
            )
            for g in range(8)
        ]
        try:
            return list(zip(requests, await asyncio.gather(*(engine.generate(r) for r in requests)), strict=True))
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_m6_the_trainer_agrees_with_the_engine_and_the_first_ratio_is_one(
    tiny_folder, make_policy, make_credited, dtype, mean
):
    grammar = Grammar("regex", "[a-z]{4}[0-9]")
    engine = HFEngine({"policy": load_hf_policy(tiny_folder["llama"], dtype)}, seed=3, gate=Gate(), deterministic=True)
    credited = []
    for request, out in _sampled(engine, [40 + i % 37 for i in range(60)], grammar):
        n, ids = len(request.prompt), request.prompt.ids + out.ids
        forced = [n + t for t, f in enumerate(out.forced) if f]
        one = make_credited(
            ids, [(n, len(ids))], masked=forced, temperature=0.7, grammar=request.sampling.grammar, name=f"{n}{ids}"
        )
        free = (0.0,) * n + out.logprobs, (False,) * n + out.constrained
        sample = replace(one.sample, behaviour=free[0], constrained=free[1])
        credited.append(replace(one, scored=replace(one.scored, sample=sample)))
    policy = make_policy(dtype=dtype)
    result = update_policy(policy, credited, PLAIN)
    unconstrained = sum(
        not c.sample.constrained[t] for c in credited for t in c.sample.spans[0:1] for t in range(t.start, t.stop)
    )
    assert result.metrics["mismatch/tokens"] == unconstrained > 30
    assert result.metrics["mismatch/mean_abs"] < mean
    for batch in policy.scorer.pack(credited):  # under the grammar's set the two agree as well
        plain_N = policy.scorer.logprobs(batch).plain_N
        assert float((plain_N - batch.behaviour_N).abs().mean()) < mean
    # Recorded values of the first forward, given as old: every ratio is 1 and the loss is what it was.
    given = [
        replace(c, scored=replace(c.scored, old=tuple(old.get(t, 0.0) for t in range(len(c.sample.ids)))))
        for c, old in zip(credited, result.old, strict=True)
    ]
    second = update_policy(policy, given, PLAIN)
    assert second.metrics["loss"] == pytest.approx(result.metrics["loss"], abs=1e-6)
    assert second.metrics["loss"] == pytest.approx(-sum(sum(c.weights) for c in credited), rel=1e-6)


def test_given_old_logprobs_are_the_ratios_denominator(make_policy, make_credited):
    policy = make_policy()
    ids = [30, 31, 32, 40, 41]
    (now,) = _logprobs(policy, [make_credited(ids, [(3, 5)])])
    for shift, ratio, clipped in ((0.1, 1.1052, 0.0), (0.5, 1.2, 1.0), (-0.5, 0.6065, 0.0)):
        old = (0.0, 0.0, 0.0, now[3] - shift, now[4] - shift)
        result = update_policy(policy, [make_credited(ids, [(3, 5)], old=old)], PLAIN)
        assert result.metrics["loss"] == pytest.approx(-ratio, rel=1e-3)
        assert result.metrics["clip_fraction"] == clipped


class _Counting:
    """A reference that counts its forwards."""

    def __init__(self, scorer):
        self.scorer, self.calls = scorer, 0

    def logprobs(self, batch):
        self.calls += 1
        assert not torch.is_grad_enabled()
        return self.scorer.logprobs(batch)


def test_l4_without_a_kl_coefficient_the_reference_is_never_asked(make_policy, family):
    reference = _Counting(make_policy(mode="frozen").scorer)
    policy, credited = make_policy(), family(6)
    result = update_policy(policy, credited, PLAIN, reference=reference)
    assert reference.calls == 0
    assert result.metrics["kl/ref"] is None
    update_policy(policy, credited, AlgorithmConfig(kl_coef=0.1), reference=reference)
    assert reference.calls == len(policy.scorer.pack(credited))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_l4_with_the_policy_as_reference_the_term_and_its_gradient_are_zero(make_policy, family, dtype, estimator):
    policy, credited = make_policy(dtype=dtype), family(12)
    reference = make_policy(dtype=dtype, mode="frozen").scorer
    kl = AlgorithmConfig(kl_coef=0.5, kl_estimator=estimator)
    result = update_policy(policy, credited, kl, reference=reference)
    assert (result.metrics["kl/ref"], result.metrics["kl/ref_max"]) == (0.0, 0.0)
    with_kl = {n: g.clone() for n, g in policy.grads.items()}
    without = _grads(policy, credited)
    assert all(torch.equal(with_kl[n], without[n]) for n in without)
    # Another reference moves the gradient: the term has an effect.
    other = make_policy(dtype=dtype, mode="frozen")
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(1.3)
    result = update_policy(policy, credited, kl, reference=other.scorer)
    assert result.metrics["kl/ref"] > 1e-3
    assert _distance(policy.grads, without) > 1e-2


def test_has_effect_leaves_out_what_cannot_move_the_weights(make_credited):
    flat = make_credited([3, 4, 5], [(1, 3)], advantage=0.0)
    dropped = make_credited([3, 4, 5], [(1, 3)], weight=0.0)
    assert not has_effect(flat, 0.0)
    assert has_effect(flat, 0.1)
    assert not has_effect(dropped, 0.1)


def test_idle_samples_still_measure_the_engine(make_policy, make_credited):
    credited = [make_credited([3, 4, 5 + i], [(1, 3)], advantage=0.0, name=f"s{i}") for i in range(20)]
    result = update_policy(make_policy(), credited, PLAIN)
    assert result.metrics["mismatch/tokens"] == 16
    assert result.metrics["samples/idle"] == 20


def test_a_gap_that_was_not_measured_is_null_and_not_zero(make_policy, make_credited):
    masked = make_credited([3, 4, 5], [(1, 3)], masked=[1, 2])
    tempered = make_credited([3, 4, 5], [(1, 3)])
    sample = replace(tempered.sample, constrained=(True,) * 3)
    under_grammar = replace(tempered, scored=replace(tempered.scored, sample=sample))
    for credited in ([masked], [under_grammar]):
        metrics = update_policy(make_policy(), credited, PLAIN).metrics
        assert metrics["mismatch/tokens"] == 0
        assert [metrics[k] for k in ("kl/mismatch", "mismatch/mean_abs", "mismatch/max")] == [None] * 3


# Numbers that are not finite


def test_a_nan_weight_ends_the_run_and_is_named_beside_the_sample(make_policy, family):
    policy = make_policy()
    with torch.no_grad():
        dict(policy.model.named_parameters())["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    with pytest.raises(DivergedError) as error:
        update_policy(policy, family(3), PLAIN)
    assert "sample 's0'" in error.value.cause
    assert "'model.layers.1.mlp.up_proj.weight' is not finite" in error.value.cause
    assert error.value.exit_code == 5


def test_a_nan_value_of_one_token_is_named(make_policy, make_credited):
    good = make_credited([3, 4, 5], [(1, 3)], name="good")
    bad = replace(make_credited([3, 4, 6], [(1, 3)], name="bad"), advantages=(0.0, 1.0, float("nan")))
    with pytest.raises(DivergedError, match="advantage value of token 2 of sample 'bad'"):
        update_policy(make_policy(), [good, bad], PLAIN)


def test_mask_reasons_alone_decide(make_policy, make_credited):
    one = make_credited([3, 4, 5, 6], [(1, 4)])
    policy = make_policy()
    for reason in MaskReason:
        sample = replace(one.sample, reasons=(MaskReason.PROMPT, reason, None, None))
        result = update_policy(policy, [replace(one, scored=replace(one.scored, sample=sample))], PLAIN)
        assert result.old[0].keys() == {2, 3}
