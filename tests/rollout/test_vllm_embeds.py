"""What of embeddings reaches vLLM: one whole, finite block of the model's width, and never beside adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError, RunFailedError
from agentrl.models.lora import Adapter
from agentrl.rollout.vllm import VLLMEngine
from agentrl.rollout.vllm_embeds import has_embeddings, prompt_block, width_of
from agentrl.rollout.vllm_fields import engine_fields
from agentrl.types import Embeddings, Prompt

BLOCK = torch.arange(12.0).reshape(3, 4)


def test_a_whole_block_is_sent_as_it_is_in_the_engines_dtype():
    sent = prompt_block(Prompt((Embeddings(BLOCK.requires_grad_(), 3, 4),)), 4, torch.bfloat16)
    assert (sent.dtype, sent.requires_grad, sent.is_contiguous()) == (torch.bfloat16, False, True)
    assert torch.equal(sent.float(), BLOCK.detach())


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (Prompt(((1, 2), Embeddings(BLOCK, 3, 4))), "token ids or embeddings, not both"),
        (Prompt((Embeddings(BLOCK, 3, 4), Embeddings(BLOCK, 3, 4))), "not both"),
        (Prompt((Embeddings(BLOCK[:, :3], 3, 3),)), r"\(3, 3\), the model takes \(3, 4\)"),
        (Prompt((Embeddings(BLOCK, 5, 4),)), r"\(3, 4\), the model takes \(5, 4\)"),
        (Prompt((Embeddings(BLOCK[:0], 0, 4),)), r"takes \(0, 4\)"),
        (Prompt((Embeddings([1.0], 3, 4),)), "embeddings is list"),
    ],
)
def test_another_shape_is_refused_with_the_sizes(prompt, words):
    with pytest.raises(ConfigError, match=words):
        prompt_block(prompt, 4, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_here(value):
    block = BLOCK.detach().clone()
    block[1, 2] = value
    with pytest.raises(RunFailedError, match="NaN or infinity"):
        prompt_block(Prompt((Embeddings(block, 3, 4),)), 4, torch.float32)


def test_an_engine_with_adapters_takes_no_embeddings_and_nothing_is_started():
    start = VLLMEngine.start(
        EngineConfig(), {"p": Path("m")}, dtype="float32", seed=0, adapters={"p": Adapter()}, prompt_embeds=True
    )
    with pytest.raises(ConfigError, match="beside adapters"):
        asyncio.run(start)


def test_an_engine_for_embeddings_keeps_no_prefix_since_blocks_look_alike():
    fields = engine_fields(
        EngineConfig(),
        Path("m"),
        build="cpu",
        dtype="float32",
        seed=0,
        max_model_len=64,
        gpu_share=1.0,
        prompt_embeds=True,
    )
    assert (fields["enable_prompt_embeds"], fields["enable_prefix_caching"]) == (True, False)


def test_the_width_is_read_from_the_config(tmp_path, tiny_folder):
    assert width_of(tiny_folder["gemma3"]) == width_of(tiny_folder["gpt2"]) == 64
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no hidden_size"):
        width_of(tmp_path)
    assert has_embeddings(Prompt(((1,), Embeddings(BLOCK, 3, 4))))
    assert not has_embeddings(Prompt.of([1]))
