"""Token log-probabilities through the head, by chunks, never T x V at once.

31,744 positions x 151,936 words in fp32 are 19 GB; a chunk of 1,024 is 0.6 GB and is recomputed in the backward pass.
Only the hidden states that predict trained tokens go through the head.

Shapes: N tokens, D hidden, V vocabulary, W packed words of an allowed set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Head:
    """The output head of a model: logits = softcap((hidden @ weight.T + bias) * scale), computed in fp32.

    A bf16 product would round logits of about 20 by 0.06, which is most of the gap between engine and trainer.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """(N, V) in fp32."""
        bias_V = None if self.bias_V is None else self.bias_V.float()
        logits_NV = torch.nn.functional.linear(hidden_ND.float(), self.weight_VD.float(), bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`current_N` at the sampling temperature, with gradient; `plain_N` at temperature 1, detached, which is what
    the engine's behaviour log-probability is compared with. Both under the allowed set where there is one."""

    current_N: Tensor
    plain_N: Tensor


def _unpack(allowed_NW: Tensor, vocab: int) -> Tensor:
    """(N, W) int32 -> (N, V) bool, bit v % 32 of word v // 32."""
    shifts = torch.arange(32, device=allowed_NW.device, dtype=torch.int32)
    bits = (allowed_NW.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, :vocab].bool()


def _chunk(
    head: Head, hidden_ND: Tensor, target_N: Tensor, temperature_N: Tensor, allowed_NW: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits_NV = head.logits(hidden_ND)
    if allowed_NW is not None:
        logits_NV = logits_NV.masked_fill(~_unpack(allowed_NW, logits_NV.shape[-1]), float("-inf"))
    plain_N = _gather(logits_NV.detach(), target_N)
    if bool((temperature_N == 1.0).all()):
        current_N = _gather(logits_NV, target_N) if logits_NV.requires_grad else plain_N
    else:
        current_N = _gather(logits_NV / temperature_N.unsqueeze(-1), target_N)
    return current_N, plain_N


def _gather(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    picked_N = logits_NV.gather(-1, target_N.unsqueeze(-1)).squeeze(-1)
    return picked_N - torch.logsumexp(logits_NV, dim=-1)


def token_logprobs(
    head: Head,
    hidden_ND: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    allowed_NW: Tensor | None = None,
    *,
    chunk: int = 1024,
) -> TokenLogprobs:
    """log p(target) of N tokens, fp32. A temperature of 0 (greedy) counts as 1: its policy is the plain softmax."""
    temperature_N = torch.where(temperature_N == 0, 1.0, temperature_N)
    current, plain = [], []
    for start in range(0, max(len(target_N), 1), chunk):
        part = slice(start, start + chunk)
        inputs = (
            head,
            hidden_ND[part],
            target_N[part],
            temperature_N[part],
            None if allowed_NW is None else allowed_NW[part],
        )
        recompute = hidden_ND.requires_grad and len(target_N) > chunk
        current_N, plain_N = checkpoint(_chunk, *inputs, use_reentrant=False) if recompute else _chunk(*inputs)
        current.append(current_N)
        plain.append(plain_N)
    return TokenLogprobs(torch.cat(current), torch.cat(plain).detach())
