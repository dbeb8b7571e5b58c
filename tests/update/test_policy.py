"""The optimiser step: masters, rates, clipping, and gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, OptimConfig
from agentrl.errors import ConfigError, DivergedError, MissingError
from agentrl.models import load_model
from agentrl.update.parts import global_norm, inner
from agentrl.update.policy import learning_rate
from agentrl.update.step import update_policy

PLAIN = AlgorithmConfig()


def _weights(policy):
    return {n: w.clone() for n, w in policy.compute_weights().items()}


def _same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_bf16_compute_is_the_model_that_an_engine_loads(tiny_folder, make_policy, arch):
    policy, engine = make_policy(arch, dtype="bfloat16"), load_model(tiny_folder[arch], "bfloat16")
    ours, theirs = policy.model.state_dict(), engine.state_dict()
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    buffers = dict(engine.named_buffers())
    for name, buffer in policy.model.named_buffers():  # rotary frequencies among them, which must stay fp32
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name])
    ids = torch.arange(3, 260)[None]
    assert torch.equal(policy.model(ids).logits, engine(ids).logits)
    assert {m.dtype for m in policy.masters.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_of_zero_moves_no_bit_even_with_weight_decay(make_policy, family, dtype):
    policy = make_policy(dtype=dtype, lr=0.0, weight_decay=0.5, max_grad_norm=1.0)
    masters = {n: m.clone() for n, m in policy.masters.items()}
    before = _weights(policy)
    for _ in range(3):
        assert update_policy(policy, family(6), PLAIN).stats.applied
    assert policy.version == 3
    assert _same(before, policy.compute_weights())
    assert _same(masters, policy.masters)


def test_masters_keep_updates_that_bf16_would_lose(make_policy):
    policy = make_policy(dtype="bfloat16", lr=1e-5, weight_decay=0.0)
    name = "model.layers.0.self_attn.q_proj.weight"
    start = policy.compute_weights()[name].clone()
    large = start.abs() > 0.1  # where half a bf16 step is at least 2.4e-4
    for _ in range(100):
        policy.zero_grad()
        policy.grads[name].fill_(1.0)
        policy.step()
    naive = start.clone()
    for _ in range(100):
        naive -= 1e-5
    assert torch.equal(naive[large], start[large])
    moved = (start.float() - policy.compute_weights()[name].float())[large]
    assert float(moved.mean()) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(
    ("optim", "rates"),
    [
        ({}, [1.0] * 6),
        ({"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.9, 0.8, 0.7]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2}, [0.5, 1.0, 1.0, 0.9, 0.8]),
        ({"schedule": "cosine"}, [0.5 + 0.5 * math.cos(math.pi * t / 10) for t in range(10)]),
    ],
)
def test_schedules_and_warm_up(optim, rates):
    config = OptimConfig(lr=2e-3, **optim)
    for step, rate in enumerate(rates):
        assert learning_rate(config, step, 10) == pytest.approx(2e-3 * rate)
    floor = config.min_lr_ratio if config.schedule != "constant" else 1.0
    for late in (10, 11, 500):
        assert learning_rate(config, late, 10) == pytest.approx(2e-3 * floor)
    assert learning_rate(config, 9, 10) > 0


def test_the_step_uses_and_reports_the_scheduled_rate(make_policy, family):
    policy = make_policy(lr=1e-4, warmup_steps=4)
    rates = [update_policy(policy, family(3), PLAIN).metrics["lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-5, 5e-5, 7.5e-5, 1e-4, 1e-4])


def test_clipping_is_by_the_global_norm(make_policy, family):
    free, clipped = make_policy(), make_policy(max_grad_norm=0.25)
    norm = update_policy(free, family(6), PLAIN).metrics["grad_norm"]
    assert norm > 0.5
    assert update_policy(clipped, family(6), PLAIN).metrics["grad_norm"] == pytest.approx(norm)
    for policy, expected in ((free, norm), (clipped, 0.25)):
        first = {n: policy.optimizer.state[m]["exp_avg"] for n, m in policy.masters.items()}
        assert global_norm(first) == pytest.approx(0.1 * expected, rel=1e-4)


def test_norms_of_large_tensors_do_not_drift():
    values = torch.randn(8_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(values.double().square().sum())
    assert inner(values, values) == pytest.approx(exact, rel=1e-6)
    assert float(torch.linalg.vector_norm(values)) ** 2 != pytest.approx(exact, rel=1e-4)  # what it stands in for
    assert math.isnan(global_norm({"a": torch.tensor([1.0, math.nan])}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_skipped(make_policy, value):
    policy = make_policy(lr=1e-2)
    before, name = _weights(policy), "model.layers.1.self_attn.k_proj.weight"

    def broken_step():
        policy.zero_grad()
        policy.grads[name][3, 4] = value
        return policy.step()

    stats = broken_step()
    assert (stats.applied, stats.broken) == (False, name)
    assert (policy.version, policy.optimizer_steps) == (0, 0)
    assert _same(before, policy.compute_weights())
    broken_step()
    policy.zero_grad()
    policy.grads[name].fill_(0.1)
    assert policy.step().applied  # a good step begins the count anew
    broken_step()
    broken_step()
    with pytest.raises(DivergedError, match=name):
        broken_step()


def test_decay_is_on_matrices_only(make_policy):
    policy = make_policy(lr=0.1, weight_decay=0.5)
    before = {n: m.clone() for n, m in policy.masters.items()}
    policy.zero_grad()
    policy.step()
    for name, master in policy.masters.items():
        expected = before[name] * (0.95 if master.dim() >= 2 else 1.0)
        torch.testing.assert_close(master, expected)


def test_tied_embeddings_are_one_parameter_that_both_ends_train(make_policy, make_credited):
    policy = make_policy()
    assert "lm_head.weight" not in policy.masters
    embedding = policy.model.get_input_embeddings().weight
    assert policy.model.get_output_embeddings().weight is embedding
    update_policy(policy, [make_credited([30, 31, 32, 40], [(3, 4)])], PLAIN)
    gradient = policy.grads["model.embed_tokens.weight"]
    assert gradient[200].any()  # the head's side: every word
    plain = load_model(policy.folder, "float32")
    logits = plain(torch.tensor([[30, 31, 32]])).logits[0, -1]
    (-logits.log_softmax(-1)[40]).backward()
    torch.testing.assert_close(gradient, plain.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-6)


def test_a_frozen_policy_has_no_optimiser_and_refuses_tokens_to_train(make_policy, make_credited):
    policy = make_policy(mode="frozen")
    assert not policy.trainable
    assert not any(p.requires_grad for p in policy.model.parameters())
    masked = make_credited([30, 31, 32], [(1, 3)], masked=(1, 2))
    assert update_policy(policy, [masked], PLAIN).stats is None
    with pytest.raises(AssertionError, match="frozen"):
        update_policy(policy, [make_credited([30, 31, 32], [(1, 3)])], PLAIN)


def test_a_folder_without_a_weight_is_refused_not_filled_with_noise(tiny_folder, make_policy, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_folder["qwen3"], tmp_path / "m")
    weights = load_file(tmp_path / "m/model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    with pytest.raises(MissingError, match="lm_head"):
        make_policy("qwen3", folder=tmp_path / "m")


def test_gradient_checkpointing_without_layers_to_recompute_is_refused(make_policy, monkeypatch):
    from transformers import modeling_layers

    monkeypatch.setattr(modeling_layers, "GradientCheckpointingLayer", type("Other", (), {}))
    with pytest.raises(ConfigError, match="no effect"):
        make_policy(gradient_checkpointing=True)
