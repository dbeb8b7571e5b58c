"""The output head in fp32, whatever the model computes in.

A bf16 product rounds logits of about 20 by 0.06, which was most of the gap to the trainer, whose head is fp32 too. The
fp32 weight is a copy, refreshed when weights change: a cast at every token would cost more than the product.

Shapes: B rows, Q positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Float32Head:
    """Stands in for the forward of a model's linear head; scale and soft cap stay the model's own, now on fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.refresh()

    def refresh(self) -> None:
        """Take the weight that the model holds now. An fp32 weight is used as it is, without a copy."""
        self._weight_VD = self._linear.weight.detach().float()
        self._bias_V = None if self._linear.bias is None else self._linear.bias.detach().float()

    def __call__(self, hidden_BQD: torch.Tensor) -> torch.Tensor:
        """(B, Q, V) in fp32."""
        # What comes is a strided view of the last positions, for which torch would copy the weight once per row.
        hidden_BQD = hidden_BQD.contiguous()
        with _exact_products(hidden_BQD):
            return nn.functional.linear(hidden_BQD.float(), self._weight_VD, self._bias_V)


@contextmanager
def _exact_products(hidden_BQD: torch.Tensor) -> Iterator[None]:
    """Within the block the bf16 units of a CPU may compute fp32 products, if the values are bf16: such products are
    exact and are summed in fp32, at a third of the cost. The switch is the process's, hence on for no longer."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if hidden_BQD.dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def use_float32_head(model: PreTrainedModel) -> Float32Head:
    """Let `model` compute its logits in fp32. Call `refresh` on what this returns whenever its weights change. Raises
    `ConfigError` for a model without a linear head."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output head", "use a causal language model")
    head = Float32Head(linear)
    setattr(linear, "forward", head)  # noqa: B010 - typed as a method
    return head
