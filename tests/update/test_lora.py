"""LoRA policies: adapters of their own on one frozen model, trained by the same update core."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.schema import AlgorithmConfig, LoraConfig, ModelConfig, OptimConfig
from agentrl.errors import ConfigError, DataError
from agentrl.models import load_model
from agentrl.models.lora import WEIGHTS, AdaptedModel, load_into, read_config
from agentrl.update.backbone import Backbone
from agentrl.update.checkpoint import load_policy, save_policy
from agentrl.update.policy import Policy
from agentrl.update.step import update_policy

PLAIN = AlgorithmConfig()
LORA = {"rank": 4, "alpha": 8}
OPTIM = {"lr": 3e-3, "max_grad_norm": 1.0, "max_tokens_per_row": 256}


@pytest.fixture
def team(tiny_folder):
    """Policies by name on one backbone; `modes` maps a name to its mode, or (mode, folder that it begins with)."""

    def make(modes: dict, arch: str = "llama", *, dtype: str = "float32", lora=LORA, **optim):
        settings = OptimConfig(**{**OPTIM, **optim})
        backbone = Backbone(tiny_folder[arch], dtype, settings)
        policies = {}
        for seed, (name, given) in enumerate(modes.items()):
            mode, start = given if isinstance(given, tuple) else (given, None)
            config = ModelConfig(
                name=f"tiny-{arch}", dtype=dtype, mode=mode, lora=LoraConfig(**lora) if mode == "lora" else None
            )
            policies[name] = Policy(
                name,
                tiny_folder[arch],
                config,
                settings,
                total_steps=10,
                train_under_grammar=True,
                backbone=backbone,
                start=start,
                seed=seed,
            )
        return policies

    return make


def _weights(policy) -> dict[str, torch.Tensor]:
    return {n: w.clone() for n, w in policy.compute_weights().items()}


def _same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def _merged(policy, folder, arch_folder):
    """The policy's adapter, merged by peft into a model of its own."""
    import peft

    save_policy(policy, folder)
    model = load_model(arch_folder, "float32", attn_implementation="sdpa")
    return peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload().eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_is_the_model_itself_to_the_last_bit(team, make_policy, family, dtype):
    ours, full = team({"p": "lora"}, dtype=dtype)["p"], make_policy(dtype=dtype)
    samples = [c.sample for c in family(6)]
    assert ours.scorer.score(samples) == full.scorer.score(samples)
    assert {m.dtype for m in ours.masters.values()} == {torch.float32}
    assert {w.dtype for w in ours.compute_weights().values()} == {ours.model.dtype}
    assert ours.layout == full.layout == "tree"


def test_only_adapters_are_trained_and_hold_gradients_and_moments(team, family):
    policy = team({"p": "lora"})["p"]
    base = {n: p.clone() for n, p in policy.model.named_parameters() if ".lora_" not in n}
    before = _weights(policy)
    for seed in range(3):
        assert update_policy(policy, family(6, seed=seed), PLAIN).stats.applied
    assert all(".lora_" in n for n in policy.masters)
    assert policy.grads.keys() == policy.masters.keys() == before.keys()
    changed = [n for n, w in policy.compute_weights().items() if not torch.equal(w, before[n])]
    assert len(changed) == len(before)
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)
    assert not any(p.requires_grad for n, p in policy.model.named_parameters() if n in base)
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_each_policy_scores_as_its_own_merged_model(team, family, tmp_path, tiny_folder, arch):
    policies = team({"a": "lora", "b": "lora"}, arch, lr=2e-2)
    for seed, policy in enumerate(policies.values()):
        for step in range(3):
            update_policy(policy, family(6, seed=10 * seed + step), PLAIN)
    samples = [c.sample for c in family(4)]
    scored = {name: policy.scorer.score(samples) for name, policy in policies.items()}
    for name, policy in policies.items():
        merged = _merged(policy, tmp_path / name, tiny_folder[arch])
        for sample, values in zip(samples, scored[name], strict=True):
            with torch.no_grad():
                table = merged(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
            for token, value in values.items():
                assert value == pytest.approx(float(table[token - 1, sample.ids[token]]), abs=1e-5)
    gaps = [abs(x - y[t]) for xs, y in zip(*scored.values(), strict=True) for t, x in xs.items()]
    assert max(gaps) > 1e-2  # two adapters that were one would pass all of the above


def test_the_gradient_is_that_of_full_weights_seen_through_the_adapter(team, make_policy, family):
    ours, full = team({"p": "lora"}, lr=0.0, max_grad_norm=None)["p"], make_policy()
    update_policy(ours, family(6), PLAIN)
    update_policy(full, family(6), PLAIN)
    name = "model.layers.1.mlp.up_proj"
    a = ours.masters[f"{name}.lora_A.weight"]
    wanted = full.grads[f"{name}.weight"] @ a.T * (LORA["alpha"] / LORA["rank"])
    assert torch.allclose(ours.grads[f"{name}.lora_B.weight"], wanted, atol=1e-7)
    assert not ours.grads[f"{name}.lora_A.weight"].any()  # B is 0


def test_a_policy_that_is_not_updated_keeps_its_bits_and_its_scores(team, family):
    policies = team({"a": "lora", "b": "lora", "c": "frozen"})
    samples = [c.sample for c in family(5)]
    before, scores = _weights(policies["b"]), {n: policies[n].scorer.score(samples) for n in "bc"}
    update_policy(policies["a"], family(6), PLAIN)
    assert _same(before, _weights(policies["b"]))
    assert {n: policies[n].scorer.score(samples) for n in "bc"} == scores
    assert not any(g.any() for g in policies["b"].grads.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_of_zero_moves_no_bit(team, family, dtype):
    policy = team({"p": "lora"}, dtype=dtype, lr=0.0, weight_decay=0.5)["p"]
    before, masters = _weights(policy), {n: m.clone() for n, m in policy.masters.items()}
    assert update_policy(policy, family(6), PLAIN).stats.applied
    assert _same(before, _weights(policy))
    assert _same(masters, policy.masters)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_reference_is_the_bare_model_and_leaves_the_gradient_alone(team, family, checkpointing):
    """With gradient checkpointing the layers are computed again after the reference has used the model without one."""
    kl = AlgorithmConfig(kl_coef=0.1)
    policies = team({"p": "lora", "r": "frozen"}, lr=1e-2, gradient_checkpointing=checkpointing)
    policy, reference = policies["p"], policies["r"].scorer
    first = update_policy(policy, family(6), kl, reference=reference)
    assert first.metrics["kl/ref"] == 0.0
    moved = update_policy(policy, family(6, seed=1), kl, reference=reference)
    assert moved.metrics["kl/ref"] > 0.0
    again = team({"p": "lora", "r": "frozen"}, lr=1e-2)
    for seed in range(2):
        update_policy(again["p"], family(6, seed=seed), kl, reference=again["r"].scorer)
    for name, weight in policy.masters.items():
        assert torch.allclose(weight, again["p"].masters[name], atol=1e-6), name


def test_a_policy_that_begins_with_an_adapter_has_a_frozen_copy_of_it_as_reference(team, family, tmp_path):
    first = team({"p": "lora"}, lr=2e-2)["p"]
    update_policy(first, family(6), PLAIN)
    save_policy(first, tmp_path / "p")
    policies = team({"p": ("lora", tmp_path / "p"), "r": ("frozen", tmp_path / "p"), "bare": "frozen"}, lr=2e-2)
    policy, samples = policies["p"], [c.sample for c in family(4)]
    assert _same(dict(first.masters), policy.masters)
    assert policy.scorer.score(samples) == policies["r"].scorer.score(samples)
    assert policy.scorer.score(samples) != policies["bare"].scorer.score(samples)
    kl = AlgorithmConfig(kl_coef=0.1)
    assert update_policy(policy, family(6), kl, reference=policies["r"].scorer).metrics["kl/ref"] == 0.0
    assert not policies["r"].trainable
    fixed = _weights(policies["r"])
    assert update_policy(policy, family(6), kl, reference=policies["r"].scorer).metrics["kl/ref"] > 0.0
    assert _same(fixed, _weights(policies["r"]))


def test_micro_batching_does_not_change_an_adapters_gradient(team, family):
    one = team({"p": "lora"}, lr=0.0, max_tokens_per_row=256)["p"]
    many = team({"p": "lora"}, lr=0.0, max_tokens_per_row=16)["p"]
    for policy in (one, many):
        for parameter in policy.masters.values():
            parameter.add_(0.01)
        policy.publish()
        update_policy(policy, family(9), PLAIN)
    for name, grad in one.grads.items():
        assert torch.allclose(grad, many.grads[name], atol=1e-6), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_adapter_takes_the_same_steps_bit_for_bit(team, family, tmp_path, dtype):
    first = team({"p": "lora"}, dtype=dtype)["p"]
    for step in range(3):
        update_policy(first, family(6, seed=step), PLAIN)
    save_policy(first, tmp_path / "saved")
    second = team({"q": "lora", "p": "lora"}, dtype=dtype)["p"]
    load_policy(second, tmp_path / "saved")
    assert (second.version, second.optimizer_steps) == (3, 3)
    for step in (3, 4):
        results = [update_policy(p, family(6, seed=step), PLAIN) for p in (first, second)]
        assert results[0].metrics == results[1].metrics
    assert _same(dict(first.masters), dict(second.masters))
    assert _same(_weights(first), _weights(second))


def test_a_saved_adapter_is_small_float32_and_peft_reads_it(team, family, tmp_path, tiny_folder):
    policy = team({"p": "lora"}, dtype="bfloat16")["p"]
    update_policy(policy, family(6), PLAIN)
    save_policy(policy, tmp_path / "p")
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"adapter_config.json", WEIGHTS, "optimizer.safetensors", "policy.json"}
    assert {t.dtype for t in load_file(tmp_path / "p" / WEIGHTS).values()} == {torch.float32}
    lora, base = read_config(tmp_path / "p")
    assert (lora.rank, lora.alpha, base) == (4, 8, "tiny-llama")
    assert set(lora.target_modules) == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_an_adapter_of_other_settings_is_refused(team, family, tmp_path):
    save_policy(team({"p": "lora"})["p"], tmp_path / "p")
    with pytest.raises(ConfigError, match=r"lora\.rank is 8, but the adapter in .* has 4"):
        team({"p": ("lora", tmp_path / "p")}, lora={"rank": 8, "alpha": 8})
    with pytest.raises(ConfigError, match=r"lora\.alpha is 4"):
        team({"p": ("lora", tmp_path / "p")}, lora={"rank": 4, "alpha": 4})
    with pytest.raises(DataError, match="is in the file only"):
        team({"p": ("lora", tmp_path / "p")}, lora={**LORA, "target_modules": ["q_proj"]})
    config = json.loads((tmp_path / "p" / "adapter_config.json").read_text())
    (tmp_path / "p" / "adapter_config.json").write_text(json.dumps(config | {"r": "four"}))
    with pytest.raises(DataError, match="no LoRA configuration"):
        team({"p": ("lora", tmp_path / "p")})


def test_target_modules_are_the_models_linear_layers(team, tiny_folder):
    policy = team({"p": "lora"}, lora={**LORA, "target_modules": ["q_proj", "down_proj"]})["p"]
    assert {n.split(".")[-3] for n in policy.masters} == {"q_proj", "down_proj"}
    for wrong in ("lm_head", "c_attn", "base_layer"):
        with pytest.raises(ConfigError, match=wrong):
            team({"p": "lora"}, lora={**LORA, "target_modules": ["q_proj", wrong]})
    model = AdaptedModel(load_model(tiny_folder["llama"], "float32"))
    model.add("a", LoraConfig(rank=2, target_modules=("q_proj",)))
    assert len(model.add("b", LoraConfig(rank=3))) == 7 * len(model.parameters("a"))


def test_the_seed_draws_the_adapter_and_nothing_else_moves(tiny_folder):
    model = AdaptedModel(load_model(tiny_folder["llama"], "float32"))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    drawn = [model.add(name, LoraConfig(rank=2), seed=seed) for name, seed in (("a", 1), ("b", 1), ("c.d", 2))]
    assert torch.equal(torch.rand(3), wanted)
    assert _same(dict(drawn[0]), dict(drawn[1]))
    assert not _same(dict(drawn[0]), dict(drawn[2]))
    with pytest.raises(DataError):
        load_into(drawn[0], tiny_folder["llama"], LoraConfig(rank=2))


@pytest.mark.slow
def test_an_adapter_learns_what_is_rewarded(team, make_credited):
    """Tokens with an even id are good, which half of those are that random weights sample."""
    policy = team({"p": "lora"}, lora={"rank": 16, "alpha": 32}, lr=2e-2)["p"]
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(24):
        ids_BT = torch.arange(40, 80).repeat(32, 1)
        with torch.no_grad():
            for _ in range(12):
                next_B1 = torch.multinomial(policy.model(ids_BT).logits[:, -1].softmax(-1), 1, generator=generator)
                ids_BT = torch.cat([ids_BT, next_B1], dim=1)
        reward_B = (ids_BT[:, 40:] % 2 == 0).float().mean(1)
        shares.append(float(reward_B.mean()))
        advantage_B = (reward_B - reward_B.mean()) / (reward_B.std() + 1e-6)
        credited = [
            make_credited(ids.tolist(), [(40, 52)], name=f"s{b}", advantage=float(advantage_B[b]), weight=1 / 32)
            for b, ids in enumerate(ids_BT)
        ]
        update_policy(policy, credited, PLAIN)
    assert shares[0] < 0.6
    assert max(shares[-4:]) > 0.8
