"""Models whose layers alternate between linear and full attention, as Qwen3.5's do: a tiny random one."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from agentrl.errors import ConfigError
from agentrl.models import load_model
from agentrl.rollout.engine import load_tokenizer
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf import HFEngine
from agentrl.rollout.hf_attention import layer_kinds
from agentrl.rollout.hf_generate import HFPolicy
from agentrl.rollout.latent import (
    Backbone,
    fill_slots,
    latent_rollout,
    latent_rollout_with_grad,
    latent_rollout_without_cache,
)
from agentrl.rollout.latent_answer import head_gap
from agentrl.rollout.latent_cache import PromptMemory
from agentrl.types import Key, Prompt, Request, Sampling
from agentrl.update.links import InnerLink

PROMPTS = [Prompt.of(ids) for ids in (tuple(range(3, 20)), tuple(range(50, 57)), (9, 8), tuple(range(100, 180)))]
STEPS = 6


def _rel(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def model():
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture
def backbone(model):
    return Backbone("tiny-qwen3.5", model)


@pytest.fixture
def link():
    torch.manual_seed(1)
    return InnerLink(64)


def test_t7_t8_t9_cached_rollouts_equal_the_recompute_of_each_prompt_alone(backbone, link):
    assert set(backbone.layer_kinds) == {"linear_attention", "full_attention"}
    cached = latent_rollout(backbone, PROMPTS, link, STEPS)
    alone = torch.cat([latent_rollout_without_cache(backbone, [p], link, STEPS).states_BmD for p in PROMPTS])
    assert _rel(cached.states_BmD, alone) < 1e-4
    assert cached.computed == tuple(len(p) + STEPS - 1 for p in PROMPTS)
    assert head_gap(backbone) < 1e-5


def test_a_state_that_cannot_be_cut_back_is_not_kept_between_rounds(backbone, link):
    memory = PromptMemory()
    latent_rollout(backbone, PROMPTS, link, STEPS, memory=memory)
    again = latent_rollout(backbone, PROMPTS, link, STEPS, memory=memory)
    assert again.reused == (0,) * len(PROMPTS)
    assert _rel(again.states_BmD, latent_rollout(backbone, PROMPTS, link, STEPS).states_BmD) < 1e-6


@pytest.mark.parametrize("checkpointed", [False, True])
def test_t20_gradients_equal_those_of_the_cacheless_recompute(backbone, link, checkpointed):
    block = torch.randn(3, 64, requires_grad=True)
    ids = [p.ids for p in PROMPTS[:3]]

    def grads(states_BmD):
        weights = torch.linspace(-1, 1, states_BmD.numel()).view_as(states_BmD)
        return torch.autograd.grad((states_BmD * weights).sum(), [block, *link.parameters()])

    prompts = [fill_slots([row, (5, 6)], [block]) for row in ids]
    ours = latent_rollout_with_grad(backbone, prompts, link, STEPS, checkpointed=checkpointed)
    rows = []
    for prompt in prompts:
        embeds = backbone.embed(prompt)[None]
        states = []
        for _ in range(STEPS):
            states.append(backbone.decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, -1])
            embeds = torch.cat([embeds, link(states[-1])[:, None]], dim=1)
        rows.append(torch.stack(states, dim=1))
    plain = torch.cat(rows)
    assert _rel(ours.states_BmD, plain) < 1e-4
    for a, b in zip(grads(ours.states_BmD), grads(plain), strict=True):
        assert _rel(a, b) < 1e-3


def test_t9_greedy_text_is_the_same_alone_and_in_a_batch_that_shrinks(model, tiny_folder):
    policy = HFPolicy(model, load_tokenizer(tiny_folder["qwen3"]), (2,), 0)

    def requests():
        keys = [Key("t", 0, str(i), 0, 0, 0) for i in range(len(PROMPTS))]
        lengths = [Sampling(0.0, max_tokens=4 + 8 * i) for i in range(len(PROMPTS))]
        return [Request("p", *parts) for parts in zip(PROMPTS, lengths, keys, strict=True)]

    async def run(batch):
        gate = Gate()
        engine = HFEngine({"p": policy}, seed=0, gate=gate, deterministic=True)
        assert engine.shared_prefix_limits == {"p": 0}
        done = await gate.gather(*(engine.generate(request) for request in batch))
        await engine.close()
        return [completion.ids for completion in done]

    together = asyncio.run(run(requests()))
    assert together == [asyncio.run(run([request]))[0] for request in requests()]


TEXT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
QWEN = {"num_key_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _qwen_with_eyes():
    config = Qwen3_5Config(
        text_config={**TEXT, **QWEN, "num_hidden_layers": 4, "linear_num_value_heads": 4},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
    )
    return Qwen3_5ForConditionalGeneration(config)


def _gemma_with_eyes():
    config = Gemma3Config(
        text_config={
            **TEXT,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": GEMMA_LAYERS,
            "sliding_window": 16,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
    )
    return Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [_qwen_with_eyes, _gemma_with_eyes])
def test_a_published_folder_with_a_vision_tower_thinks_by_its_text_part(make, link, tmp_path):
    torch.manual_seed(0)
    whole = make().eval()
    whole.save_pretrained(tmp_path)
    backbone = Backbone("eyes", load_model(tmp_path, "float32"))
    cached = latent_rollout(backbone, PROMPTS, link, STEPS)
    alone = torch.cat([latent_rollout_without_cache(backbone, [p], link, STEPS).states_BmD for p in PROMPTS])
    assert _rel(cached.states_BmD, alone) < 1e-4
    ids = torch.tensor([PROMPTS[0].ids])
    with torch.no_grad():
        torch.testing.assert_close(backbone.model(ids).logits, whole(ids).logits, atol=1e-5, rtol=1e-5)


def test_layers_of_another_kind_are_refused_by_name():
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "conv"]
    with pytest.raises(ConfigError, match="llama model has layers of kind 'conv'"):
        layer_kinds(config)
    config.layer_types = ["linear_attention"] * 2
    with pytest.raises(ConfigError, match="no attention layer"):
        layer_kinds(config)
