"""A frozen model as latent rollouts use it, and prompts as its input embeddings.

Shapes: B rows, L longest prompt, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from agentrl.errors import ConfigError
from agentrl.rollout.hf_attention import ATTENTION, layer_kinds, use_prefix_attention
from agentrl.types import Embeddings, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Backbone:
    """One frozen model, shared by every agent that names it.

    Freezes the model, puts it into eval mode, and takes its decoder stack (last state after the final norm) and its
    embedding module, which scales where the model does. Raises `ConfigError` for a model with its own gradient
    checkpointing on: that drops the cache, and each latent step would see one token; and for layers of an unknown kind.
    """

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        if model.is_gradient_checkpointing:
            raise ConfigError(
                f"model {name!r} has transformers' gradient checkpointing on, which drops the cache",
                "switch it off: latent rollouts are checkpointed as a whole",
            )
        if model.config._attn_implementation != ATTENTION:
            use_prefix_attention(model)
        self.name = name
        self.model = model.requires_grad_(False).eval()
        self.decoder: nn.Module = model.get_decoder()
        self.embeddings: nn.Module = model.get_input_embeddings()
        config = model.config.get_text_config()
        self.layer_kinds = layer_kinds(config)
        self.window = int(config.max_position_embeddings)
        sliding = config.to_dict().get("sliding_window")
        self.sliding_window = None if sliding is None else int(sliding)

    @property
    def _table(self) -> Tensor:
        table = self.embeddings.weight
        assert isinstance(table, Tensor)
        return table

    @property
    def dim(self) -> int:
        return int(self._table.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self._table.dtype

    @property
    def device(self) -> torch.device:
        return self._table.device

    def embed(self, prompt: Prompt, skip: int = 0) -> Tensor:
        """The input embeddings of a prompt without its first `skip` ids, (L - skip, D); blocks keep their gradient.

        Raises `ConfigError` for a block of another width.
        """
        parts = []
        for segment in prompt.segments:
            if isinstance(segment, Embeddings):
                block = segment.handle
                if not isinstance(block, Tensor) or tuple(block.shape) != (segment.length, self.dim):
                    shape = tuple(block.shape) if isinstance(block, Tensor) else type(block).__name__
                    raise ConfigError(
                        f"a block of embeddings is {shape}, model {self.name!r} takes ({segment.length}, {self.dim})",
                        "send it through the outer link of this edge",
                    )
                parts.append(block.to(self.device, self.dtype))
                continue
            ids = segment[skip:]
            skip = max(0, skip - len(segment))
            if ids:
                parts.append(self.embeddings(torch.tensor(ids, device=self.device)))
        return torch.cat(parts)

    def check_fits(self, length: int, new: int, what: str) -> None:
        """Raises `ConfigError` when `length` prompt positions and `new` further ones exceed the model's window."""
        if length + new > self.window:
            raise ConfigError(
                f"model {self.name!r}: a prompt of {length} positions and {new} {what} need {length + new}, "
                f"its window is {self.window}",
                "shorten the question, or lower latent_steps or max_tokens",
            )


def pad_prompts(
    backbone: Backbone, prompts: Sequence[Prompt], skip: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Left-padded embeddings (B, L, D) and their mask (B, L); pads are zero vectors. `skip[b]` leading ids are left
    out."""
    blocks = [backbone.embed(prompt, 0 if skip is None else skip[b]) for b, prompt in enumerate(prompts)]
    longest = max(block.shape[0] for block in blocks)
    mask_BL = torch.ones(len(blocks), longest, dtype=torch.long, device=backbone.device)
    for b, block in enumerate(blocks):
        mask_BL[b, : longest - block.shape[0]] = 0
    return pad_sequence(blocks, batch_first=True, padding_side="left"), mask_BL


def positions_of(mask_BL: Tensor) -> Tensor:
    """Positions that count a row's own tokens from 0, whatever padding stands before or between them."""
    return (mask_BL.cumsum(-1) - 1).clamp_(min=0)
