"""Token log-probabilities through the head, by chunks, never T x V at once.

31,744 positions x 151,936 words in fp32 are 19 GB; a chunk of 1,024 is 0.6 GB and is computed again in the backward
pass. Only places that predict trained tokens go through the head, and a place that several samples share goes once.

Shapes: X cells of a row, U places (a hidden state, a temperature, an allowed set), N trained tokens, D hidden,
V vocabulary, W packed words of an allowed set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class Head:
    """The output head of a model: logits = softcap((hidden @ weight.T + bias) * scale), in fp32.

    A bf16 result would round logits of about 20 by 0.06, which is most of the gap between engine and trainer. With
    `sink_VD` (fp32) the weight's gradient is added there, unrounded, and not handed to autograd.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    sink_VD: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the head is asked: `hidden_U` indexes the cells, `allowed_UW` int32 holds the packed allowed sets (None:
    no place has one). Token n is predicted at place `place_N[n]` and is `target_N[n]`.

    A temperature of 0 (greedy) counts as 1: its policy is the plain softmax.
    """

    hidden_U: Tensor
    temperature_U: Tensor
    allowed_UW: Tensor | None
    place_N: Tensor
    target_N: Tensor

    def chunks(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the places, each with the indices of the tokens that are predicted there."""
        order_N = torch.argsort(self.place_N, stable=True)
        starts = list(range(0, len(self.hidden_U), size))
        bounds = torch.searchsorted(
            self.place_N[order_N].contiguous(), torch.tensor([*starts[1:]], device=order_N.device)
        ).tolist()
        for start, low, high in zip(starts, [0, *bounds], [*bounds, len(order_N)], strict=True):
            yield slice(start, start + size), order_N[low:high]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`current_N` at the sampling temperature, with gradient; `plain_N` at temperature 1, detached, which is what
    the engine's behaviour log-probability is compared with. Both under the allowed set where there is one."""

    current_N: Tensor
    plain_N: Tensor


def token_logprobs(head: Head, hidden_XD: Tensor, places: Places, *, chunk: int = 1024) -> TokenLogprobs:
    """log p(target) of N tokens, fp32; the gradient equals that of the plain form. `chunk` places at once."""
    temperature_U = torch.where(places.temperature_U == 0, 1.0, places.temperature_U)
    places = Places(places.hidden_U, temperature_U, places.allowed_UW, places.place_N, places.target_N)
    weight_VD = head.weight_VD if head.sink_VD is None else head.weight_VD.detach()
    function: Any = _TokenLogprobs
    current_N, plain_N = function.apply(hidden_XD, weight_VD, head.bias_V, head, places, chunk)
    return TokenLogprobs(current_N, plain_N)


def unpack_allowed(allowed_UW: Tensor, vocab: int) -> Tensor:
    """(U, W) int32 -> (U, V) bool, bit v % 32 of word v // 32."""
    shifts = torch.arange(32, device=allowed_UW.device, dtype=torch.int32)
    bits = (allowed_UW.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, :vocab].bool()


@contextmanager
def _narrow_products(narrow: bool) -> Iterator[None]:
    """Within the block a CPU takes fp32 products on its bf16 units: factors in bf16, sums and results in fp32.

    Factors that hold bf16 values lose nothing, so log-probabilities are those of fp32. In the backward pass the
    logits' gradient is rounded to bf16, as every other gradient of a bf16 model is.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if narrow:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class _TokenLogprobs(torch.autograd.Function):
    """Fused head and log-softmax: the backward pass makes softmax minus one-hot in place instead of keeping the
    intermediate results that autograd would."""

    @staticmethod
    def forward(
        ctx: Any, hidden_XD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, head: Head, places: Places, chunk: int
    ) -> tuple[Tensor, Tensor]:
        current_N = torch.empty(len(places.target_N), device=hidden_XD.device)
        plain_N = torch.empty_like(current_N)
        normaliser_U = torch.empty(len(places.hidden_U), device=hidden_XD.device)
        wide_VD = weight_VD.float()
        logits_UV = None
        for part, tokens in places.chunks(chunk):
            logits_UV = _logits(hidden_XD, wide_VD, bias_V, head, places, part)
            temperature_U = places.temperature_U[part]
            plain_U = torch.logsumexp(logits_UV, dim=-1)
            if bool((temperature_U == 1.0).all()):
                scaled_U = plain_U
            else:
                scaled_U = torch.logsumexp(logits_UV / temperature_U.unsqueeze(-1), dim=-1)
            normaliser_U[part] = scaled_U
            row_N = places.place_N[tokens] - part.start
            picked_N = logits_UV[row_N, places.target_N[tokens]]
            plain_N[tokens] = picked_N - plain_U[row_N]
            current_N[tokens] = picked_N / temperature_U[row_N] - scaled_U[row_N]
        keep = len(places.hidden_U) <= chunk and any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden_XD, weight_VD, bias_V, normaliser_U, logits_UV if keep else None)
        ctx.extra = head, places, chunk
        ctx.mark_non_differentiable(plain_N)
        return current_N, plain_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_XD, weight_VD, bias_V, normaliser_U, kept_UV = ctx.saved_tensors
        head, places, chunk = ctx.extra
        wide_VD = weight_VD.float()
        grad_XD = torch.zeros(hidden_XD.shape, device=hidden_XD.device)
        sink_VD = head.sink_VD
        if sink_VD is None and ctx.needs_input_grad[1]:
            sink_VD = torch.zeros_like(wide_VD)
        grad_V = torch.zeros(len(wide_VD), device=wide_VD.device) if ctx.needs_input_grad[2] else None
        for part, tokens in places.chunks(chunk):
            logits_UV = kept_UV if kept_UV is not None else _logits(hidden_XD, wide_VD, bias_V, head, places, part)
            row_N = places.place_N[tokens] - part.start
            grad_UV = _grad_logits(
                logits_UV,
                normaliser_U[part],
                places.temperature_U[part],
                row_N,
                places.target_N[tokens],
                grad_N[tokens],
            )
            if head.softcap is not None:
                slope_UV = 1.0 - (logits_UV / head.softcap).square()
                grad_UV = grad_UV * torch.where(logits_UV.isinf(), 0.0, slope_UV)
            if head.scale != 1.0:
                grad_UV = grad_UV * head.scale
            index_U = places.hidden_U[part]
            with _narrow_products(_is_narrow(hidden_XD, head)):
                grad_XD.index_add_(0, index_U, grad_UV @ wide_VD)
                if sink_VD is not None:
                    sink_VD.addmm_(grad_UV.T, hidden_XD[index_U].float())
            if grad_V is not None:
                grad_V += grad_UV.sum(0)
        grad_weight_VD = None if head.sink_VD is not None or sink_VD is None else sink_VD.to(weight_VD.dtype)
        grad_bias_V = None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype)
        return grad_XD.to(hidden_XD.dtype), grad_weight_VD, grad_bias_V, None, None, None


def _is_narrow(hidden_UD: Tensor, head: Head) -> bool:
    return hidden_UD.device.type == "cpu" and hidden_UD.dtype == head.weight_VD.dtype == torch.bfloat16


def _logits(
    hidden_XD: Tensor, wide_VD: Tensor, bias_V: Tensor | None, head: Head, places: Places, part: slice
) -> Tensor:
    """(U, V) fp32 of one chunk of places, minus infinity outside their allowed sets."""
    hidden_UD = hidden_XD[places.hidden_U[part]]
    with _narrow_products(_is_narrow(hidden_UD, head)):
        logits_UV = hidden_UD.float() @ wide_VD.T
    if bias_V is not None:
        logits_UV += bias_V.float()
    if head.scale != 1.0:
        logits_UV *= head.scale
    if head.softcap is not None:
        logits_UV = torch.tanh(logits_UV / head.softcap) * head.softcap
    if places.allowed_UW is not None:
        logits_UV.masked_fill_(~unpack_allowed(places.allowed_UW[part], logits_UV.shape[-1]), float("-inf"))
    return logits_UV


def _grad_logits(
    logits_UV: Tensor, normaliser_U: Tensor, temperature_U: Tensor, row_N: Tensor, target_N: Tensor, grad_N: Tensor
) -> Tensor:
    """d(sum_n grad_n * current_n) / d logits: (one-hot - softmax) / temperature, summed over the tokens of a place."""
    grad_N = grad_N / temperature_U[row_N]
    total_U = torch.zeros_like(normaliser_U).index_add_(0, row_N, grad_N)
    grad_UV = logits_UV / temperature_U.unsqueeze(-1)
    grad_UV.sub_(normaliser_U.unsqueeze(-1)).exp_().mul_(-total_U.unsqueeze(-1))
    # Flat and one by one: `index_put_` with threads would add the tokens of a place in no fixed order.
    grad_UV.view(-1).index_add_(0, row_N * grad_UV.shape[-1] + target_N, grad_N)
    return grad_UV
