"""One frozen model in the trainer, which the LoRA policies that name it share with their references."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from agentrl.config.schema import OptimConfig
from agentrl.errors import ConfigError
from agentrl.models import load_model
from agentrl.models.lora import AdaptedModel
from agentrl.update.batch import Layout
from agentrl.update.probe import HEAD_GAP, choose_layout, head_gap, miniature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Backbone:
    """A model's weights, loaded once, with its row layout. Policies put their adapters on `adapted`.

    Raises `ConfigError` for a model whose rows or head the trainer cannot compute.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Literal["float32", "bfloat16"],
        optim: OptimConfig,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        model: PreTrainedModel = load_model(folder, dtype, attn_implementation="sdpa", device=device)
        self.layout: Layout
        # Both questions are put to a small fp32 model of the same kind, so these weights are in memory once.
        self.layout, self.parity = choose_layout(model, share_prefix=optim.share_prefix)
        gap = head_gap(miniature(model))
        if not gap <= HEAD_GAP:
            raise ConfigError(
                f"{folder.name}: the chunked head differs from the model's own logits by {gap:.1e}",
                "use a model whose logits are a linear head with optional scale and soft cap",
            )
        self.adapted = AdaptedModel(model)

    @property
    def model(self) -> PreTrainedModel:
        return self.adapted.model
