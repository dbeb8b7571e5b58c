"""Latent rollouts on tiny models of four architectures: the cached form against naive ones, batches, positions, memory
between rounds, and gradients."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import DynamicCache

from agentrl.errors import ConfigError, RunFailedError
from agentrl.models import load_model, prepare
from agentrl.models.attention import plain_attention
from agentrl.rollout import latent_attention
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf import HFEngine
from agentrl.rollout.hf_generate import HFPolicy
from agentrl.rollout.latent import (
    Backbone,
    fill_slots,
    latent_rollout,
    latent_rollout_with_grad,
    latent_rollout_without_cache,
    pad_prompts,
)
from agentrl.rollout.latent_answer import head_gap, head_logits, text_logprobs, text_loss, text_states
from agentrl.rollout.latent_attention import STEP_ATTENTION
from agentrl.rollout.latent_cache import PromptMemory
from agentrl.rollout.latent_lead import LeadMemory
from agentrl.types import Embeddings, Key, Prompt, Request, Sampling
from agentrl.update.links import InnerLink, OuterLink, checksum, transfer

ARCHS = ("llama", "qwen3", "gemma3", "gpt2")
PROMPTS = [tuple(range(3, 20)), tuple(range(50, 57)), (9, 8, 7), tuple(range(100, 130))]


def _rel(a, b):
    return ((a - b).norm() / b.norm()).item()


def _ids(*rows):
    return [Prompt.of(row) for row in rows]


@pytest.fixture(scope="session")
def backbones(tiny_folder):
    return {arch: Backbone(arch, load_model(tiny_folder[arch], "float32")) for arch in ARCHS}


@pytest.fixture
def make_backbone(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    return lambda name: Backbone(name, load_model(prepare(name), "float32"))


@pytest.fixture(params=ARCHS)
def backbone(request, backbones):
    return backbones[request.param]


@pytest.fixture
def llama(backbones):
    return backbones["llama"]


@pytest.fixture
def link(backbones):
    torch.manual_seed(1)
    return InnerLink(64)


def _model_logits(backbone, prompt):
    return backbone.model(inputs_embeds=backbone.embed(prompt)[None]).logits[0]


def _naive(backbone, ids, link, steps):
    """The definition, from the whole model: the head's input at the last position, everything recomputed."""
    embeds = backbone.model.get_input_embeddings()(torch.tensor(ids))[None]
    states = []
    with torch.no_grad():
        for _ in range(steps):
            out = backbone.model(inputs_embeds=embeds, output_hidden_states=True, use_cache=False)
            states.append(out.hidden_states[-1][0, -1])
            embeds = torch.cat([embeds, link(states[-1])[None, None]], dim=1)
    return torch.stack(states) if states else torch.zeros(0, backbone.dim)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_t6_t7_rollout_equals_the_naive_recompute(backbone, link, steps):
    out = latent_rollout(backbone, _ids(*PROMPTS), link, steps)
    for row, ids in enumerate(PROMPTS):
        assert _rel(out.states_BmD[row], _naive(backbone, ids, link, steps)) < 1e-4


def test_t6_the_stored_state_is_the_heads_input(backbone, link):
    out = latent_rollout(backbone, _ids(*PROMPTS), link, 1)
    for row, ids in enumerate(PROMPTS):
        with torch.no_grad():
            logits = backbone.model(torch.tensor([ids])).logits[0, -1]
        head = backbone.model.get_output_embeddings()
        torch.testing.assert_close(head(out.states_BmD[row, 0]), logits, atol=1e-5, rtol=1e-5)


def test_t7_m_states_cost_m_forwards_and_the_last_is_not_fed_back(llama, link):
    fed = []
    hook = llama.decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: fed.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    out = latent_rollout(llama, _ids(PROMPTS[0]), link, 5)
    hook.remove()
    assert [e.shape[1] for e in fed] == [17, 1, 1, 1, 1]
    for k in range(4):
        torch.testing.assert_close(fed[k + 1][0, 0], link(out.states_BmD[0, k]))


def test_t7_zero_steps_give_an_empty_block_and_no_forward(llama, link):
    calls = []
    hook = llama.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    memory = PromptMemory()
    for out in (
        latent_rollout(llama, _ids(*PROMPTS), link, 0, memory=memory),
        latent_rollout_with_grad(llama, _ids(*PROMPTS), link, 0),
        latent_rollout_without_cache(llama, _ids(*PROMPTS), link, 0),
    ):
        assert out.states_BmD.shape == (4, 0, 64)
        assert out.computed == (0,) * 4
    hook.remove()
    assert calls == []
    assert fill_slots([[1, 2], [3]], [out.states_BmD[0]]) == Prompt(((1, 2), (3,)))


def test_t8_cached_equals_cacheless_and_computes_l_plus_m_minus_1(backbone, link):
    steps = 9
    cached = latent_rollout(backbone, _ids(*PROMPTS), link, steps)
    whole = latent_rollout_without_cache(backbone, _ids(*PROMPTS), link, steps)
    assert _rel(cached.states_BmD, whole.states_BmD) < 1e-4
    assert cached.computed == tuple(len(p) + steps - 1 for p in PROMPTS)
    assert whole.computed == tuple(steps * len(p) + steps * (steps - 1) // 2 for p in PROMPTS)


def test_t8_positions_of_the_specs_example_are_347_against_15528(llama, link):
    prompt = _ids(tuple(range(3, 303)))
    columns = []
    hook = llama.decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: columns.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    assert latent_rollout(llama, prompt, link, 48).computed == (347,)
    assert sum(columns) == 347
    columns.clear()
    assert latent_rollout_without_cache(llama, prompt, link, 48).computed == (15_528,)
    hook.remove()
    assert sum(columns) == 15_528


@pytest.mark.parametrize("arch", ARCHS)
def test_t8_bf16_cached_points_the_same_way_as_cacheless(tiny_folder, link, arch):
    backbone = Backbone(arch, load_model(tiny_folder[arch], "bfloat16"))
    cached = latent_rollout(backbone, _ids(*PROMPTS), link, 8).states_BmD
    whole = latent_rollout_without_cache(backbone, _ids(*PROMPTS), link, 8).states_BmD
    assert cached.dtype == torch.bfloat16
    assert float(torch.cosine_similarity(cached.float(), whole.float(), dim=-1).min()) >= 0.999


def test_t9_a_left_padded_batch_equals_each_prompt_alone(backbone, link):
    batch = latent_rollout(backbone, _ids(*PROMPTS), link, 6)
    for row, ids in enumerate(PROMPTS):
        alone = latent_rollout(backbone, _ids(ids), link, 6)
        assert _rel(batch.states_BmD[row], alone.states_BmD[0]) < 1e-4
        assert batch.computed[row] == alone.computed[0]


@pytest.mark.parametrize("pads", [1, 5, 40])
def test_t10_more_padding_does_not_move_the_latents(backbone, link, pads):
    short = PROMPTS[2]
    alone = latent_rollout(backbone, _ids(short), link, 6).states_BmD[0]
    padded = latent_rollout(backbone, _ids(short, tuple(range(3, 6 + pads))), link, 6).states_BmD[0]
    assert float((padded - alone).abs().max()) < 1e-4


def test_t8_t9_a_sliding_window_shorter_than_the_rollout_changes_nothing(backbones, link):
    gemma = backbones["gemma3"]
    assert gemma.sliding_window == 64
    rows = [tuple(range(3, 103)), tuple(range(200, 270)), (5, 6)]
    out = latent_rollout(gemma, _ids(*rows), link, 12)
    for row, ids in enumerate(rows):
        assert _rel(out.states_BmD[row], _naive(gemma, ids, link, 12)) < 1e-4


def test_t11_latents_that_are_token_embeddings_give_the_all_token_logits(backbone):
    parts, middle = [(3, 4, 5), (6, 7), (8, 9)], [(20, 21), (30,)]
    embed = backbone.model.get_input_embeddings()
    blocks = [embed(torch.tensor(ids)).detach() for ids in middle]
    prompt = fill_slots(parts, blocks)
    assert [type(s) is Embeddings for s in prompt.segments] == [False, True, False, True, False]
    with torch.no_grad():
        spliced = _model_logits(backbone, prompt)
        tokens = backbone.model(torch.tensor([[3, 4, 5, 20, 21, 6, 7, 30, 8, 9]])).logits[0]
    torch.testing.assert_close(spliced, tokens, atol=1e-5, rtol=1e-5)


def test_t11_slots_and_blocks_must_match_and_be_finite(llama):
    with pytest.raises(ConfigError, match="1 slots cannot take 2"):
        fill_slots([(1,), (2,)], [torch.zeros(1, 64)] * 2)
    block = torch.zeros(3, 64)
    block[2, 5] = float("nan")
    with pytest.raises(RunFailedError, match=r"slot 2 \(\(3, 64\)\) holds NaN"):
        fill_slots([(1,), (2,), (3,)], [torch.zeros(3, 64), block])
    with pytest.raises(ConfigError, match=r"\(3, 48\), model 'llama' takes \(3, 64\)"):
        llama.embed(fill_slots([(1,), (2,)], [torch.zeros(3, 48)]))


def test_t12_t21_a_block_crosses_to_another_size_and_architecture(backbones, link, make_backbone):
    wide = make_backbone("tiny-qwen3-h96")
    outer = OuterLink(64, 96)
    states = latent_rollout(backbones["gemma3"], _ids(*PROMPTS), link, 5).states_BmD
    blocks = transfer(states, link, outer).detach()
    assert blocks.shape == (4, 5, 96)
    prompts = [fill_slots([ids, (7, 8)], [block]) for ids, block in zip(PROMPTS, blocks, strict=True)]
    out = latent_rollout(wide, prompts, InnerLink(96), 3)
    assert out.states_BmD.shape == (4, 3, 96)
    assert out.prompt_positions == tuple(len(ids) + 7 for ids in PROMPTS)


def test_t14_no_head_runs_in_a_rollout_and_one_per_token_in_the_decode(llama, link):
    heads = []
    hook = llama.model.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))
    states = latent_rollout(llama, _ids(*PROMPTS), link, 6).states_BmD
    assert heads == []
    prompt = fill_slots([PROMPTS[0], (7, 8)], [states[0]])
    counts = []
    for tokens in (1, 5):  # the engine's probes run the head too, as often each time
        heads.clear()
        assert len(_decode(llama, [prompt], tokens)[0].ids) == tokens
        counts.append(len(heads))
    hook.remove()
    assert counts[1] - counts[0] == 4


def _decode(backbone, prompts, tokens=5):
    policy = HFPolicy(backbone.model, None, (), 0, grammar=object())
    gate = Gate()
    engine = HFEngine({"p": policy}, seed=0, gate=gate, deterministic=True)

    async def run():
        requests = [
            Request("p", prompt, Sampling(temperature=0.0, max_tokens=tokens), Key("eval", 0, str(i), 0, 0, 0))
            for i, prompt in enumerate(prompts)
        ]
        answers = await gate.gather(*(engine.generate(r) for r in requests))
        await engine.close()
        return answers

    return asyncio.run(run())


def test_t9_greedy_text_after_latents_is_the_same_alone_and_in_a_batch(backbone, link):
    states = latent_rollout(backbone, _ids(*PROMPTS), link, 6).states_BmD
    blocks = link(states).detach()
    prompts = [fill_slots([ids, (7, 8)], [block]) for ids, block in zip(PROMPTS, blocks, strict=True)]
    together = _decode(backbone, prompts)
    assert [c.ids for c in together] == [_decode(backbone, [p])[0].ids for p in prompts]
    with torch.no_grad():
        first = int(_model_logits(backbone, prompts[0])[-1].argmax())
    assert together[0].ids[0] == first


def test_t16_the_channel_carries_the_first_agents_prompt_and_only_through_the_block(llama, link):
    def logits(ids, steps):
        states = latent_rollout(llama, _ids(ids), link, steps).states_BmD[0]
        with torch.no_grad():
            return _model_logits(llama, fill_slots([(3, 4), (5, 6)], [link(states)]))[-1]

    assert not torch.allclose(logits(PROMPTS[0], 4), logits(PROMPTS[3], 4), atol=1e-3)
    assert torch.equal(logits(PROMPTS[0], 0), logits(PROMPTS[3], 0))


# Memory between rounds


def _rounds(blocks, suffixes):
    heads = [tuple(range(3, 23)), tuple(range(40, 52)), tuple(range(90, 110))]
    return [fill_slots([head, suffix], [block]) for head, suffix, block in zip(heads, suffixes, blocks, strict=True)]


@pytest.mark.parametrize("suffixes", [[(7, 8)] * 3, [(7, 8), (7, 8, 9, 10, 11), (7,)]])
def test_t26_text_before_the_slot_is_computed_once_and_changes_nothing(backbone, link, suffixes):
    torch.manual_seed(3)
    memory = PromptMemory()
    for turn in range(3):
        prompts = _rounds(torch.randn(3, 4, 64) * 0.5, suffixes)
        fresh = latent_rollout(backbone, prompts, link, 5)
        out = latent_rollout(backbone, prompts, link, 5, memory=memory)
        assert _rel(out.states_BmD, fresh.states_BmD) < 1e-4
        assert out.reused == ((20, 12, 20) if turn else (0, 0, 0))
        assert out.computed == tuple(f - r for f, r in zip(fresh.computed, out.reused, strict=True))


def test_memory_goes_on_from_a_first_prompt_without_a_slot_with_more_room(backbone, link):
    memory = PromptMemory()
    first = _ids(tuple(range(3, 30)), tuple(range(40, 60)))
    latent_rollout(backbone, first, link, 2, memory=memory)
    later = [
        fill_slots([(*range(3, 23), 99, 98), (7, 8)], [torch.randn(6, 64)]),
        fill_slots([tuple(range(40, 58)), (7, 8, 9)], [torch.randn(6, 64)]),
    ]
    for expected in ((20, 18), (20, 18)):
        out = latent_rollout(backbone, later, link, 12, memory=memory)
        assert out.reused == expected
        assert _rel(out.states_BmD, latent_rollout(backbone, later, link, 12).states_BmD) < 1e-4


def test_memory_starts_again_for_other_questions_or_another_batch(llama, link):
    memory = PromptMemory()
    latent_rollout(llama, _ids(*PROMPTS), link, 2, memory=memory)
    other = _ids(*(tuple(i + 200 for i in ids) for ids in PROMPTS))
    for prompts in (other, other[:2]):
        out = latent_rollout(llama, prompts, link, 2, memory=memory)
        assert out.reused == (0,) * len(prompts)
        torch.testing.assert_close(out.states_BmD, latent_rollout(llama, prompts, link, 2).states_BmD)
    same = latent_rollout(llama, other[:2], link, 2, memory=memory)
    assert same.reused == tuple(len(p) - 1 for p in other[:2])


def test_memory_is_left_alone_where_a_sliding_window_would_see_its_gaps(backbones, link):
    gemma, memory = backbones["gemma3"], PromptMemory()
    heads = [tuple(range(3, 83)), tuple(range(100, 170))]
    suffixes = [(7, 8), (9, 10, 11, 12)]
    for _ in range(2):
        prompts = [fill_slots([h, s], [torch.randn(4, 64)]) for h, s in zip(heads, suffixes, strict=True)]
        out = latent_rollout(gemma, prompts, link, 5, memory=memory)
        assert out.reused == (0, 0)
        assert _rel(out.states_BmD, latent_rollout(gemma, prompts, link, 5).states_BmD) < 1e-4
    alone = PromptMemory()
    for reused in (0, 80):
        prompts = [fill_slots([heads[0], (7, 8)], [torch.randn(4, 64)])]
        out = latent_rollout(gemma, prompts, link, 5, memory=alone)
        assert out.reused == (reused,)
        assert _rel(out.states_BmD, latent_rollout(gemma, prompts, link, 5).states_BmD) < 1e-4


# Gradients


def _loss_through(backbone, link, outer, prompts, answers, **options):
    states = latent_rollout_with_grad(backbone, prompts, link, 4, **options).states_BmD
    blocks = transfer(states, link, outer)
    asked = [fill_slots([(3, 4, 5), (6, 7)], [block]) for block in blocks]
    forced = text_states(backbone, asked, answers, checkpointed=options.get("checkpointed", True))
    return text_loss(text_logprobs(backbone, forced), forced)


ANSWERS = [(11, 12, 13), (14,), (15, 16), (17, 18, 19, 20)]


def _grads(loss, *modules):
    for module in modules:
        module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for module in modules for p in module.parameters()])


def test_t20_checkpointing_changes_neither_states_nor_gradients(backbone, link):
    torch.manual_seed(4)
    outer, prompts = OuterLink(64, 64), _ids(*PROMPTS)
    loss = [_loss_through(backbone, link, outer, prompts, ANSWERS, checkpointed=c) for c in (True, False)]
    torch.testing.assert_close(loss[0], loss[1])
    grads = [_grads(value, link, outer) for value in loss]
    assert _rel(*grads) < 1e-5
    states = latent_rollout_with_grad(backbone, prompts, link, 4).states_BmD
    assert _rel(states, latent_rollout(backbone, prompts, link, 4).states_BmD) < 1e-5


LEADS = {
    "shared text alone": [(3, 4, 5, 6, 7)] * 4,
    "shared text, then each row's own": [(3, 4, 5), (3, 4, 5, 6, 7, 8), (3, 4, 5, 60), (3, 4, 5, 70, 71)],
    "nothing shared": list(PROMPTS),
}


@pytest.mark.parametrize("leads", LEADS.values(), ids=LEADS)
def test_t20_text_before_the_first_block_needs_no_graph(backbone, link, leads):
    torch.manual_seed(5)
    outer, blocks = OuterLink(64, 64), torch.randn(4, 3, 64)
    memory = LeadMemory()

    def grads(used):
        sent = outer(blocks)
        prompts = [fill_slots([lead, (9, 8)], [block]) for lead, block in zip(leads, sent, strict=True)]
        out = latent_rollout_with_grad(backbone, prompts, link, 4, checkpointed=False, leads=used)
        asked = [fill_slots([lead, (6,)], [block]) for lead, block in zip(leads, out.states_BmD, strict=True)]
        forced = text_states(backbone, asked, ANSWERS, leads=used)
        loss = text_loss(text_logprobs(backbone, forced), forced)
        return out.states_BmD.detach(), _grads(loss, link, outer)

    states, grad = grads(None)
    for _ in range(2):  # the second time from memory
        quick_states, quick_grad = grads(memory)
        assert _rel(quick_states, states) < 1e-5
        assert _rel(quick_grad, grad) < 1e-5


def test_shared_text_is_computed_once_over_all_batches(llama, link):
    lengths, memory = [], LeadMemory()
    hook = llama.decoder.register_forward_pre_hook(
        lambda _m, _a, kw: lengths.append(kw["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    for block in torch.randn(3, 2, 5, 64):
        prompts = [fill_slots([tuple(range(3, 20)), (4,)], [row]) for row in block]
        text_states(llama, prompts, [(11,), (12, 13)], leads=memory)
    hook.remove()
    assert lengths == [(1, 17), (2, 8), (2, 8), (2, 8)]


def test_t20_a_batch_of_four_has_the_gradient_of_four_rows_accumulated(llama, link):
    outer = OuterLink(64, 64)
    whole = _grads(_loss_through(llama, link, outer, _ids(*PROMPTS), ANSWERS) * 10, link, outer)
    rows = [
        _loss_through(llama, link, outer, _ids(ids), [answer]) * len(answer)
        for ids, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    assert _rel(_grads(sum(rows), link, outer), whole) < 1e-5


def test_t19_the_gradient_agrees_with_finite_differences_through_every_step(backbone):
    torch.manual_seed(5)
    link, outer, prompts = InnerLink(64), OuterLink(64, 64), _ids(*PROMPTS)
    grads = _grads(_loss_through(backbone, link, outer, prompts, ANSWERS), link, outer)
    parameters = [*link.parameters(), *outer.parameters()]
    direction = torch.sign(grads).split([p.numel() for p in parameters])

    def at(step):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d.view_as(p), alpha=step)
            value = _loss_through(backbone, link, outer, prompts, ANSWERS).double().item()
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(d.view_as(p), alpha=step)
        return value

    eps = 3e-5
    slope = (at(eps) - at(-eps)) / (2 * eps)
    assert slope == pytest.approx(float(grads.abs().sum()), rel=1e-3)


@pytest.mark.parametrize("length", [5, 90])
def test_t20_step_attention_has_the_gradient_of_a_stock_cache(backbone, link, length):
    """Also where the rollout is longer than the sliding window, with and without padding."""
    rows = [tuple(range(3, 3 + length)), tuple(range(200, 200 + max(3, length - 20)))]

    def stock(prompts):
        embeds, mask = pad_prompts(backbone, prompts)
        cache, states = DynamicCache(), []
        for _ in range(6):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -embeds.shape[1] :]
            out = backbone.decoder(
                inputs_embeds=embeds, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            states.append(out.last_hidden_state[:, -1])
            embeds = link(states[-1])[:, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        return torch.stack(states, dim=1)

    for ids in (rows, rows[:1]):
        block = torch.randn(2, 64, requires_grad=True)
        prompts = [fill_slots([row, (7, 8)], [block]) for row in ids]
        both = [stock(prompts), latent_rollout_with_grad(backbone, prompts, link, 6).states_BmD]
        assert _rel(both[1], both[0]) < 1e-5
        direction = torch.randn(both[0].shape, generator=torch.Generator().manual_seed(2))
        wrt = [block, *link.parameters()]
        want, got = (torch.autograd.grad((s * direction).sum(), wrt) for s in both)
        for a, b in zip(got, want, strict=True):
            assert _rel(a, b) < 1e-5
    assert backbone.decoder.config._attn_implementation != STEP_ATTENTION


@pytest.mark.parametrize("length", [5, 90])
@pytest.mark.parametrize("lead", [True, False], ids=["lead", "whole"])
def test_t20_plain_products_have_the_gradient_of_fused_attention(backbone, link, length, lead, monkeypatch):
    """In float32, where both are exact to rounding; also beyond the sliding window, where a mask cuts keys off, and
    with a scale that is not the head size's."""
    for module in backbone.decoder.modules():
        if hasattr(module, "scaling"):
            monkeypatch.setattr(module, "scaling", 0.5 * module.scaling)
    torch.manual_seed(6)
    outer, blocks = OuterLink(64, 64), torch.randn(2, 3, 64)
    texts = [tuple(range(3, 3 + length)), tuple(range(200, 200 + max(3, length - 20)))]
    used = []

    def plain(*args):
        used.append(args[0].shape[2])
        return plain_attention(*args)

    def grads(rows):
        leads = LeadMemory() if lead else None
        prompts = [fill_slots([text, (9, 8)], [block]) for text, block in zip(texts, outer(blocks), strict=True)][:rows]
        out = latent_rollout_with_grad(backbone, prompts, link, 4, checkpointed=False, leads=leads)
        asked = [fill_slots([text, (6,)], [block]) for text, block in zip(texts, out.states_BmD, strict=False)]
        forced = text_states(backbone, asked, ANSWERS[:rows], leads=leads)
        return _grads(text_loss(text_logprobs(backbone, forced), forced), link, outer)

    for rows in (2, 1):
        fused = grads(rows)
        with monkeypatch.context() as patch:
            patch.setattr(latent_attention, "plain_attention", plain)
            patch.setattr(
                latent_attention, "plain_is_better", lambda q, k, m: m is not None or q.shape[2] == k.shape[2]
            )
            assert _rel(grads(rows), fused) < 1e-5
    assert len(used) >= 4 * len(backbone.layer_kinds)  # the rollout's prompt and the text, twice


def test_links_are_trained_by_plain_products_in_bf16_and_used_without(tiny_folder, link, monkeypatch):
    backbone = Backbone("llama", load_model(tiny_folder["llama"], "bfloat16"))
    chosen = []
    monkeypatch.setattr(latent_attention, "plain_attention", lambda *a: chosen.append(1) or plain_attention(*a))
    block = torch.randn(3, 64, requires_grad=True)
    prompts = [fill_slots([row, (9,)], [block]) for row in PROMPTS]
    with torch.no_grad():
        latent_rollout_with_grad(backbone, prompts, link, 2)
        assert not chosen
    latent_rollout_with_grad(backbone, prompts, link, 2, checkpointed=False)
    assert len(chosen) == len(backbone.layer_kinds)  # the prompt; latent steps have an attention of their own


def test_training_keeps_no_copy_of_the_prompt_per_step(make_backbone):
    wide, link, kept = make_backbone("tiny-llama-h128"), InnerLink(128), {}
    for steps in (2, 12):
        storages = {}

        def count(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            latent_rollout_with_grad(wide, _ids(*[tuple([5] * 1000)] * 2), link, steps, checkpointed=False)
        kept[steps] = sum(storage.nbytes() for storage in storages.values())
    prompt_keys_and_values = 2 * 2 * 2 * 1000 * 64 * 4  # two rows, two layers, two key heads of 32, fp32
    assert (kept[12] - kept[2]) / 10 < 0.5 * prompt_keys_and_values


def test_first_step_form_keeps_the_states_and_cuts_the_gradient_after_the_first(llama, link):
    block = torch.randn(4, 3, 64, requires_grad=True)
    prompts = [fill_slots([ids, (7, 8)], [b]) for ids, b in zip(PROMPTS, block, strict=True)]
    full = latent_rollout_with_grad(llama, prompts, link, 4).states_BmD
    first = latent_rollout_with_grad(llama, prompts, link, 4, gradient="first").states_BmD
    torch.testing.assert_close(first, full)
    (later,) = torch.autograd.grad(full[:, 1:].sum(), block, retain_graph=True)
    assert later.abs().sum() > 0
    wanted, got = (torch.autograd.grad(s[:, 0].square().sum(), block, retain_graph=True)[0] for s in (full, first))
    torch.testing.assert_close(got, wanted)
    (none,) = torch.autograd.grad(first[:, 1:].sum(), block, allow_unused=True)
    assert none is None or not none.any()


def test_t17_only_links_get_gradients_and_the_backbone_stays_bit_equal(llama, link):
    outer = OuterLink(64, 64)
    before = checksum(llama.model)
    optimiser = torch.optim.SGD([*link.parameters(), *outer.parameters()], lr=0.1)
    _loss_through(llama, link, outer, _ids(*PROMPTS), ANSWERS).backward()
    optimiser.step()
    assert all(p.grad is not None for module in (link, outer) for p in module.parameters())
    assert all(p.grad is None and not p.requires_grad for p in llama.model.parameters())
    assert checksum(llama.model) == before


def test_answer_logprobs_are_the_models_own(backbone):
    assert head_gap(backbone) < 1e-5
    forced = text_states(backbone, _ids(*PROMPTS), ANSWERS)
    logprobs = text_logprobs(backbone, forced)
    for row, (ids, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        with torch.no_grad():
            logits = backbone.model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
        want = torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, : len(answer)], want, atol=1e-5, rtol=1e-5)
        assert not logprobs[row, len(answer) :].any()
        torch.testing.assert_close(head_logits(backbone, forced.before_BTD[row, : len(answer)]), logits)
    torch.testing.assert_close(forced.at_BTD[0, 0], forced.before_BTD[0, 1])
    assert text_loss(logprobs, forced).item() == pytest.approx(-float(logprobs.sum()) / 10)


# Values and faults


def test_t26_accounting_keeps_steps_and_positions_apart(llama, link):
    out = latent_rollout(llama, _ids(*PROMPTS), link, 6)
    actions = out.actions("planner")
    assert [(a.agent, a.steps, a.positions) for a in actions] == [("planner", 6, len(p) + 5) for p in PROMPTS]
    torch.testing.assert_close(torch.tensor([a.norms for a in actions]), out.states_BmD.norm(dim=-1))


def test_t29_two_runs_give_bit_equal_latents(backbone, link):
    first = latent_rollout(backbone, _ids(*PROMPTS), link, 6)
    assert torch.equal(first.states_BmD, latent_rollout(backbone, _ids(*PROMPTS), link, 6).states_BmD)


def test_a_prompt_that_does_not_fit_is_refused_with_the_sizes(backbones, link):
    gpt2 = backbones["gpt2"]
    latent_rollout(gpt2, _ids(tuple([5] * 1022)), link, 3)
    with pytest.raises(ConfigError, match=r"1023 positions and 2 .* need 1025, its window is 1024"):
        latent_rollout(gpt2, _ids(tuple([5] * 1023)), link, 3)
    with pytest.raises(ConfigError, match="need 1025"):
        text_states(gpt2, _ids(tuple([5] * 1023)), [(1, 2)])
    with pytest.raises(ConfigError, match="empty prompt"):
        latent_rollout(gpt2, [Prompt(())], link, 3)
    with pytest.raises(ConfigError, match="latent_steps is -1"):
        latent_rollout(gpt2, _ids((1,)), link, -1)
    with pytest.raises(ConfigError, match="text 2 of 2 is empty"):
        text_states(gpt2, _ids((1,), (2,)), [(1,), ()])


def test_states_that_are_not_finite_are_named(llama):
    def broken(x):
        return torch.full_like(x, float("nan"))

    with pytest.raises(RunFailedError, match="row 1 at latent step 2 of 3"):
        latent_rollout(llama, _ids(*PROMPTS), broken, 3)


def test_transformers_own_checkpointing_is_refused(tiny_folder):
    model = load_model(tiny_folder["llama"], "float32")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="drops the cache"):
        Backbone("llama", model)
