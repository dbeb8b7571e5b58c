"""Attention with gradients over short sequences in bfloat16 on a CPU.

There torch's fused attention is slow on the way back: at 16 rows of 12 queries and 40 keys it takes 13 times as long as
the plain products, forward and backward together, and 3 times as long at 256 of each. The plain form keeps the weights
until the backward pass: 2 bytes per query head, query and key.

    out = softmax(scale q K^T + bias) V

Shapes: B rows, H query heads, K key heads, G = H / K, Q queries, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_KEYS = 512
"""Up to here the plain form was faster at all sizes that were measured, and its weights are a part of what a layer
keeps anyway."""


def plain_is_better(query_BHQD: Tensor, key_BKSD: Tensor, mask_B1QS: Tensor | None) -> bool:
    """Whether `plain_attention` is the faster one. Not without a gradient, and not where a mask is left out but would
    not be a plain triangle."""
    with_grad = torch.is_grad_enabled() and (query_BHQD.requires_grad or key_BKSD.requires_grad)
    queries, keys = query_BHQD.shape[2], key_BKSD.shape[2]
    known = mask_B1QS is not None or queries in (1, keys)
    on_cpu = query_BHQD.device.type == "cpu" and query_BHQD.dtype == torch.bfloat16
    return with_grad and on_cpu and known and keys <= MAX_KEYS


def plain_attention(
    query_BHQD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask_B1QS: Tensor | None, scale: float | None = None
) -> Tensor:
    """(B, Q, H, D). The mask is True where a query sees a key; without one, queries see the keys up to their own, and a
    single query sees all. A query that sees nothing (padding) stays finite. The softmax is accumulated in fp32."""
    rows, heads, queries, size = query_BHQD.shape
    key_heads, keys = key_BKSD.shape[1:3]
    groups, dtype = heads // key_heads, query_BHQD.dtype
    # Queries that share a key head stand in its rows, so no key is repeated.
    query_BKRD = query_BHQD.reshape(rows, key_heads, groups * queries, size)
    scores_BKRS = (query_BKRD * (size**-0.5 if scale is None else scale)) @ key_BKSD.transpose(2, 3)
    if mask_B1QS is None and queries > 1:
        mask_B1QS = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query_BHQD.device).tril()
    if mask_B1QS is not None:
        bias = torch.zeros_like(mask_B1QS, dtype=dtype).masked_fill_(~mask_B1QS, torch.finfo(dtype).min)
        scores_BKRS = scores_BKRS + bias.repeat(1, 1, groups, 1)
    out_BKRD = scores_BKRS.softmax(dim=-1) @ value_BKSD
    return out_BKRD.reshape(rows, heads, queries, -1).transpose(1, 2)
