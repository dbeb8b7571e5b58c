"""Sampling of one token per row: grammar mask, behaviour log-probability, temperature, top-k, top-p, inverse CDF.

Shapes: B rows of the batch, V vocabulary, W packed words of a bitmask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.types import Sampling


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling values of a batch as columns, each of shape (B,)."""

    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor

    @staticmethod
    def of(samplings: list[Sampling], device: torch.device) -> RowParams:
        return RowParams(
            torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            torch.tensor([s.top_k for s in samplings], dtype=torch.int64, device=device),
            torch.tensor([s.top_p for s in samplings], dtype=torch.float32, device=device),
        )

    def select(self, rows: torch.Tensor) -> RowParams:
        return RowParams(self.temperature_B[rows], self.top_k_B[rows], self.top_p_B[rows])


def unpack_bitmask(bitmask_BW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 (B, W) -> bool (B, V): bit v % 32 of word v // 32 is token v."""
    bytes_Bb = bitmask_BW.view(torch.uint8)
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bitmask_BW.device)
    return (bytes_Bb[:, :, None] & bits).bool().flatten(1)[:, :vocab_size]


def sample(logits_BV: torch.Tensor, params: RowParams, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, and its behaviour log-probability.

    `logits_BV` is fp32, -inf where a grammar forbids. The log-probability is `log_softmax` at temperature 1, before
    top-k and top-p; NaN tells of NaN logits. The draw divides by the temperature, keeps the `top_k` largest, then the
    smallest set whose renormalised mass reaches `top_p` (ties at the border are kept), and inverts the CDF at
    `uniforms_B` in vocabulary order, so a row's draw is a function of its own logits and its own uniform number.
    Temperature 0 takes the largest logit.
    """
    lse_B = torch.logsumexp(logits_BV, dim=-1)
    greedy_B = params.temperature_B == 0
    tokens_B = torch.empty_like(params.top_k_B)
    if bool(greedy_B.any()):
        tokens_B[greedy_B] = logits_BV[greedy_B].argmax(dim=-1)
    if not bool(greedy_B.all()):
        rows = torch.nonzero(~greedy_B).squeeze(1)
        whole = len(rows) == len(tokens_B)
        logits_RV = logits_BV if whole else logits_BV[rows]
        drawn_R = _draw(logits_RV, params if whole else params.select(rows), uniforms_B if whole else uniforms_B[rows])
        tokens_B[rows] = drawn_R
    logprobs_B = logits_BV.gather(1, tokens_B[:, None]).squeeze(1) - lse_B
    return tokens_B, logprobs_B


def _draw(logits_RV: torch.Tensor, params: RowParams, uniforms_R: torch.Tensor) -> torch.Tensor:
    if bool((params.temperature_B != 1).any()):
        logits_RV = logits_RV / params.temperature_B[:, None]
    cut = (params.top_k_B > 0) | (params.top_p_B < 1)
    if bool(cut.any()):
        logits_RV = logits_RV.clone()
        logits_RV[cut] = keep_top(logits_RV[cut], params.top_k_B[cut], params.top_p_B[cut])
    cdf_RV = torch.softmax(logits_RV, dim=-1).cumsum(dim=-1)
    total_R = cdf_RV[:, -1]
    # Strictly below the total, so that the first larger entry exists and belongs to a token with mass.
    target_R = torch.minimum(uniforms_R.to(total_R) * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    return torch.searchsorted(cdf_RV, target_R[:, None], right=True).squeeze(1).clamp_(max=logits_RV.shape[1] - 1)


def keep_top(logits_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """-inf outside the `top_k` largest (0: all), then outside the smallest set with mass `top_p` of what is left."""
    vocab = logits_RV.shape[1]
    only_k = bool((top_k_R > 0).all())
    width = min(vocab, int(top_k_R.max()) if only_k else 1024)
    largest_Rk = torch.topk(logits_RV, width, dim=-1).values
    if not only_k and width < vocab:
        unlimited = top_k_R == 0
        mass_R = torch.exp(torch.logsumexp(largest_Rk, -1) - torch.logsumexp(logits_RV, -1))
        if bool((unlimited & (mass_R < top_p_R)).any()) or int(top_k_R.max()) > width:
            largest_Rk = torch.sort(logits_RV, dim=-1, descending=True).values
            width = vocab
    rank_k = torch.arange(width, device=logits_RV.device)
    limit_R = torch.where(top_k_R > 0, top_k_R.clamp(max=width), torch.full_like(top_k_R, width))
    kept_Rk = largest_Rk.masked_fill(rank_k >= limit_R[:, None], -torch.inf)
    # The mass of an unlimited row is taken over the whole vocabulary, of which the largest may be a part.
    whole_R = torch.where(top_k_R > 0, torch.logsumexp(kept_Rk, -1), torch.logsumexp(logits_RV, -1))
    probs_Rk = torch.exp(kept_Rk - whole_R[:, None])
    before_Rk = probs_Rk.cumsum(-1) - probs_Rk
    inside_Rk = (before_Rk < top_p_R[:, None]) & torch.isfinite(kept_Rk)
    border_R = kept_Rk.masked_fill(~inside_Rk, torch.inf).amin(dim=-1)
    unbounded_R = (top_k_R == 0) & (top_p_R >= 1)
    border_R = border_R.masked_fill(unbounded_R, -torch.inf)
    return logits_RV.masked_fill(logits_RV < border_R[:, None], -torch.inf)
