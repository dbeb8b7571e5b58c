"""Prompts of input embeddings for the vllm engine: from this run's own driver to its own actor, never over HTTP.

vLLM takes what its model takes after the embedding module (scaled where the model scales), so the driver embeds ids
itself and sends one block. Nothing of a wrong shape and nothing that is not finite leaves this process, and an engine
that serves adapters takes no block: the two together crash vLLM on Llama-like models.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from agentrl.errors import ConfigError, RunFailedError
from agentrl.types import Embeddings, Prompt


def has_embeddings(prompt: Prompt) -> bool:
    return any(isinstance(segment, Embeddings) for segment in prompt.segments)


def width_of(folder: Path) -> int:
    """The size of a model's input embeddings. Raises `ConfigError` for a config that does not tell it."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    text = config.get("text_config") or config
    width = text.get("hidden_size") or text.get("n_embd")
    if not isinstance(width, int):
        raise ConfigError(f"{folder}/config.json names no hidden_size", "use engine.kind: hf for this model")
    return width


def prompt_block(prompt: Prompt, width: int, dtype: torch.dtype) -> Tensor:
    """The whole prompt as one block (L, D) on the CPU, in the dtype that the engine computes in.

    Raises `ConfigError` for a prompt that is not one block of the model's width, `RunFailedError` for values that are
    not finite.
    """
    segment = prompt.segments[0] if len(prompt.segments) == 1 else None
    if not isinstance(segment, Embeddings):
        raise ConfigError("the vllm engine takes token ids or embeddings, not both", "embed the whole prompt first")
    block = segment.handle
    if not isinstance(block, Tensor) or tuple(block.shape) != (segment.length, width) or not segment.length:
        shape = tuple(block.shape) if isinstance(block, Tensor) else type(block).__name__
        raise ConfigError(
            f"a prompt of embeddings is {shape}, the model takes ({segment.length}, {width})",
            "send embeddings made for this policy",
        )
    if not bool(torch.isfinite(block).all()):
        raise RunFailedError(
            f"a prompt of embeddings ({segment.length}, {width}) holds NaN or infinity",
            "train the links again with a lower optim.lr, or load whole ones",
        )
    return block.detach().to("cpu", dtype).contiguous()
