"""What stands in prompts before their first block of embeddings: it depends on no link, so it needs no gradient.

The keys and values of those leading ids are computed without a graph. What all rows of a batch share (system text,
role, worked examples) is computed once, kept over a whole run, and spread over the rows; the rest once per batch.

Shapes: B rows, K key heads, P shared ids, C leading columns, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.rollout.hf_attention import LINEAR
from agentrl.rollout.latent_attention import StepCache, StepLayer, step_attention
from agentrl.rollout.latent_backbone import Backbone, positions_of
from agentrl.rollout.latent_cache import leading_ids
from agentrl.types import Prompt

Layers = tuple[tuple[Tensor, Tensor], ...]  # keys and values of every layer, (1 or B, K, C, D)


class LeadMemory:
    """Keys and values of ids that whole batches begin with, by model. Frozen models only: nothing is ever stale.
    `computed` positions went through models for them so far."""

    def __init__(self, capacity: int = 16) -> None:
        self._kept: OrderedDict[tuple[Backbone, tuple[int, ...]], Layers] = OrderedDict()
        self._capacity = capacity
        self.computed = 0

    def recall(self, backbone: Backbone, common: tuple[int, ...]) -> tuple[tuple[int, ...], Layers]:
        """The longest kept beginning of `common`, unless that is much shorter: then all of `common` is computed."""
        fitting = [k for k in self._kept if k[0] is backbone and common[: len(k[1])] == k[1]]
        best = max(fitting, key=lambda k: len(k[1]), default=None)
        if best is None or 4 * len(best[1]) < 3 * len(common):
            best = (backbone, common)
            self._kept[best] = compute_leads(backbone, [common], None)
            self.computed += len(common)
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        self._kept.move_to_end(best)
        return best[1], self._kept[best]


@dataclass(frozen=True, slots=True)
class Lead:
    """`skip[b]` leading ids of row b are in the cache already, standing where `mask_BC` is 1; the first `shared` of
    them were computed for all rows at once."""

    layers: Layers
    kinds: tuple[str, ...]
    skip: tuple[int, ...]
    shared: int
    mask_BC: Tensor

    def open(self) -> StepCache:
        """A fresh cache that begins with them."""
        return StepCache(self.kinds, self.layers)


def leads_of(backbone: Backbone, prompts: Sequence[Prompt], memory: LeadMemory | None, new: int) -> Lead:
    """What a forward over these prompts and `new` further positions may begin with; nothing without a memory.

    Nothing either where a sliding window, which counts columns, would see the gaps between a row's parts, and for
    models with linear attention, whose states are not kept per position.
    """
    # One id at least is left: the state at a prompt's last position opens the rollout.
    rows = [leading_ids(prompt)[: len(prompt) - 1] for prompt in prompts]
    width = max(map(len, prompts)) + max(map(len, rows)) + new
    slides = backbone.sliding_window is not None and width > backbone.sliding_window
    common = _common(rows)
    if memory is None or slides or LINEAR in backbone.layer_kinds or not common:
        return Lead((), backbone.layer_kinds, (0,) * len(rows), 0, _ones(backbone, len(rows), 0))
    shared, layers = memory.recall(backbone, common)
    mask_BC = _ones(backbone, len(rows), len(shared))
    rests = [row[len(shared) :] for row in rows]
    if any(rests):
        # A row without a rest would be all padding; it computes one pad whose column is masked.
        longest = max(map(len, rests))
        layers = compute_leads(backbone, rests, layers)
        own_BR = torch.tensor([[int(c >= longest - len(rest)) for c in range(longest)] for rest in rests])
        mask_BC = torch.cat([mask_BC, own_BR.to(backbone.device)], dim=1)
    return Lead(layers, backbone.layer_kinds, tuple(map(len, rows)), len(shared), mask_BC)


@torch.no_grad()
def compute_leads(backbone: Backbone, rests: Sequence[Sequence[int]], shared: Layers | None) -> Layers:
    """Keys and values of every row's ids after the shared ones, both in one piece: (B, K, P + R, D)."""
    longest = max(map(len, rests))
    ids_BR = torch.tensor([[*[0] * (longest - len(rest)), *rest] for rest in rests], device=backbone.device)
    own_BR = torch.tensor([[int(c >= longest - len(rest)) for c in range(longest)] for rest in rests])
    past = 0 if shared is None else shared[0][0].shape[2]
    mask_BC = torch.cat([_ones(backbone, len(rests), past), own_BR.to(backbone.device)], dim=1)
    cache = StepCache(backbone.layer_kinds, shared or ())
    with step_attention(backbone.decoder):
        backbone.decoder(
            inputs_embeds=backbone.embeddings(ids_BR),
            attention_mask=mask_BC,
            position_ids=positions_of(mask_BC)[:, past:],
            past_key_values=cache,
            step_cache=cache,
            use_cache=True,
        )
    # The caller lets no linear attention in: every layer holds keys and values.
    return tuple(layer.held() for layer in cache.layers if isinstance(layer, StepLayer))


def _ones(backbone: Backbone, rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.long, device=backbone.device)


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ids that all rows begin with."""
    low, high = min(rows), max(rows)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:same]
