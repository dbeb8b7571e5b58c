"""Every layout gives each token the log-probability that it has alone; the probe falls back where one does not."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.grammar import GrammarFactory
from agentrl.models import load_model
from agentrl.types import Grammar
from agentrl.update import batch, probe, scorer
from agentrl.update.probe import choose_layout, head_gap, miniature, parity_gap
from agentrl.update.scorer import Scorer, head_of

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt2")


def _scorer(model, **options):
    values = {"layout": "tree", "capacity": 4096, "chunk": 50, "grammar": None, "train_under_grammar": False, **options}
    return Scorer(model, **values)


def _alone(model, sample, temperature=1.0):
    with torch.no_grad():
        logits_TV = model(torch.tensor([sample.ids]), use_cache=False).logits[0].float() / temperature
    return logits_TV.log_softmax(-1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", ["tree", "packed", "padded"])
def test_rows_equal_each_sample_alone(tiny_folder, make_credited, arch, layout):
    model = load_model(tiny_folder[arch], "float32", attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 262, (400,), generator=generator).tolist()
    stem = ids[:70]  # gemma3 slides a window of 64, shorter than these samples
    samples = [
        make_credited([*stem, *ids[a:b]], [(1, 70 + b - a)], temperature=0.7, name=f"{a}").sample
        for a, b in ((70, 110), (70, 95), (100, 160), (170, 171), (70, 110))
    ]
    samples.append(make_credited(ids[200:220], [(1, 20)], temperature=0.7).sample)
    assert model.config.get_text_config().to_dict().get("sliding_window") in (None, 64)
    for sample, values in zip(samples, _scorer(model, layout=layout).score(samples), strict=True):
        logprobs_TV = _alone(model, sample, 0.7)
        assert values.keys() == set(range(1, len(sample.ids)))
        for t, value in values.items():
            assert value == pytest.approx(float(logprobs_TV[t - 1, sample.ids[t]]), abs=2e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tiny_model_takes_trees_and_its_own_head(make_policy, arch):
    policy = make_policy(arch)
    assert policy.layout == "tree"
    assert policy.parity["tree"] <= 1e-5
    assert head_gap(policy.model) < 1e-4
    assert make_policy(arch, share_prefix=False).layout == "packed"


@pytest.mark.parametrize("attributes", [{"final_logit_softcapping": 0.7}, {"logits_scaling": 4.0}])
def test_head_gap_sees_a_scale_or_cap_that_the_model_does_not_apply(tiny_folder, attributes):
    model = load_model(tiny_folder["llama"], "float32", attn_implementation="sdpa")
    for name, value in attributes.items():
        setattr(model.config, name, value)
    assert head_gap(model) > 1e-3


def test_gemma_applies_the_soft_cap_that_its_config_names(tiny_folder):
    model = load_model(tiny_folder["gemma3"], "float32", attn_implementation="sdpa")
    model.config.final_logit_softcapping = 0.7
    assert head_of(model).softcap == 0.7
    assert head_gap(model) < 1e-4


def _leaking(parents):
    return torch.tril(torch.ones(len(parents), len(parents), dtype=torch.bool))


def test_the_probe_catches_a_leak_across_branches_and_falls_back(tiny_folder, monkeypatch):
    model = load_model(tiny_folder["llama"], "float32", attn_implementation="sdpa")
    monkeypatch.setattr(batch, "_ancestors", _leaking)
    layout, gaps = choose_layout(model, share_prefix=True)
    assert layout == "packed"
    assert gaps["tree"] > 1e-3


def test_the_probe_catches_a_forgotten_window(tiny_folder, monkeypatch):
    model = load_model(tiny_folder["gemma3"], "float32", attn_implementation="sdpa")
    both = lambda model, batch: dict.fromkeys(("full_attention", "sliding_attention"), batch.mask)  # noqa: E731
    monkeypatch.setattr(scorer, "model_mask", lambda m, b: both(m, b) if b.mask is not None else None)
    layout, gaps = choose_layout(model, share_prefix=True)
    assert layout == "packed"
    assert gaps["tree"] > 1e-4


def test_the_probe_catches_an_all_ones_mask_over_packed_samples(tiny_folder, monkeypatch):
    model = load_model(tiny_folder["llama"], "float32", attn_implementation="sdpa")
    monkeypatch.setattr(scorer, "model_mask", lambda m, b: torch.ones_like(b.ids_BT) if b.mask is None else b.mask)
    assert choose_layout(model, share_prefix=False)[0] == "padded"


def test_a_parity_gap_of_nan_is_no_parity(tiny_folder, monkeypatch):
    small = miniature(load_model(tiny_folder["llama"], "float32", attn_implementation="sdpa"))
    monkeypatch.setattr(Scorer, "score", lambda self, samples: [{1: math.nan} for _ in samples])
    assert parity_gap(small, "tree") == math.inf


def test_a_model_that_no_layout_fits_is_refused(tiny_folder, monkeypatch):
    model = load_model(tiny_folder["llama"], "float32", attn_implementation="sdpa")
    monkeypatch.setattr(probe, "parity_gap", lambda model, layout: 0.5)
    with pytest.raises(ConfigError, match="padded"):
        choose_layout(model, share_prefix=True)


def test_the_probe_keeps_the_global_random_state(tiny_folder):
    model = load_model(tiny_folder["llama"], "float32", attn_implementation="sdpa")
    before = torch.random.get_rng_state()
    choose_layout(model, share_prefix=True)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_constrained_tokens_are_scored_under_their_allowed_set(tiny_folder, make_credited, temperature):
    folder = tiny_folder["llama"]
    model = load_model(folder, "float32", attn_implementation="sdpa")
    factory = GrammarFactory.from_folder(folder)
    grammar = Grammar("regex", "[a-f]{3}x")
    matcher = factory.matcher(grammar)
    prompt, sampled, allowed = [40, 41, 42], [], []
    while len(sampled) < 5:
        allowed.append(torch.from_numpy(matcher.allowed().copy()))
        sampled.append(int(allowed[-1].nonzero()[-1]))
        matcher.advance(sampled[-1])
    ids = prompt + sampled
    credited = make_credited(ids, [(3, 8)], grammar=grammar, temperature=temperature, masked=(6, 7))
    (values,) = _scorer(model, grammar=factory, train_under_grammar=True).score([credited.sample])
    logits_TV = model(torch.tensor([ids])).logits[0].float().detach()
    assert values.keys() == {3, 4, 5}  # x and the end token are forced
    for t in values:
        masked_V = logits_TV[t - 1].masked_fill(~allowed[t - 3], -torch.inf)
        assert values[t] == pytest.approx(float((masked_V / temperature).log_softmax(-1)[ids[t]]), abs=1e-5)
    (full,) = _scorer(model).score([credited.sample])
    assert all(full[t] < values[t] - 0.1 for t in values)
