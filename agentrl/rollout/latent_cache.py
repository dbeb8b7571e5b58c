"""What an agent's key-value cache keeps between recursion rounds.

From round to round an agent reads the same text up to the slot that another agent's latents fill. A `PromptMemory`
belongs to one agent and one batch of questions: it keeps the cache of the last rollout and gives back, row by row, the
leading ids that the next prompt shares with it.

The kept columns of the cache end where the last row's shared ids end. Whatever another row has there beyond its own
shared ids is masked, so rows may share more or less; positions come from the mask.

Shapes: B rows, K kept columns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.rollout.hf_attention import PrefixCache, PrefixLayer
from agentrl.types import Prompt


class LatentCache(PrefixCache):
    """A cache with room for a whole rollout, which can be cut back and used again."""

    def cut(self, length: int, capacity: int) -> None:
        """Forget all columns from `length` on and make room for `capacity` in all."""
        for layer in self.layers:
            if not isinstance(layer, PrefixLayer):
                assert length == 0, "the state of a linear attention cannot be cut back"
                continue
            layer.length = length
            layer.capacity = capacity
            if not layer.is_initialized or layer.keys.shape[2] >= capacity:
                continue
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
                new[:, :, :length] = old[:, :, :length]
                setattr(layer, name, new)

    def running(self) -> LatentCache:
        """The same columns for a batch that goes on and drops rows, which leaves this cache with all of them."""
        other = copy.copy(self)
        other.layers = [copy.copy(layer) for layer in self.layers]
        other._biases = []
        return other

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            if isinstance(layer, PrefixLayer):
                layer.keys, layer.values = layer.keys[indices], layer.values[indices]
            else:
                layer.batch_select_indices(indices)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rollout may start from: `reused[b]` leading ids of row b, standing where `mask_BK` is 1."""

    cache: LatentCache
    reused: tuple[int, ...]
    mask_BK: Tensor

    def gaps_break(self, window: int | None, lengths: Sequence[int], new: int) -> bool:
        """A sliding window counts columns of the cache, so a gap between a row's tokens is only harmless while the
        whole row (prompts of `lengths`, and `new` further tokens) fits the window."""
        rests = [length - count for length, count in zip(lengths, self.reused, strict=True)]
        if window is None or self.mask_BK.shape[1] + max(rests) + new <= window:
            return False
        return len(set(rests)) > 1 or not bool(self.mask_BK[:, -1].all())


class PromptMemory:
    """The cache of one agent for one batch of questions, over all rounds. Not for gradients."""

    def __init__(self) -> None:
        self._cache: LatentCache | None = None
        self._ids: tuple[tuple[int, ...], ...] = ()
        self._starts: tuple[int, ...] = ()

    def recall(
        self, prompts: Sequence[Prompt], device: torch.device, leads: Sequence[tuple[int, ...]] | None = None
    ) -> Kept | None:
        """What is still valid for these prompts; None where there is nothing, or too little to be worth it.

        `leads` are the ids of each prompt that come again in every round; none: those before its first block.
        """
        if self._cache is None or len(self._ids) != len(prompts):
            return None
        leading = _leads(prompts, leads)
        # At least one position is left to compute: its state opens the rollout.
        shared = tuple(
            min(_common(old, lead), len(prompt) - 1)
            for old, lead, prompt in zip(self._ids, leading, prompts, strict=True)
        )
        if 2 * sum(shared) < sum(map(len, leading)):
            return None
        ends = [start + count for start, count in zip(self._starts, shared, strict=True)]
        mask_BK = torch.zeros(len(prompts), max(ends), dtype=torch.long, device=device)
        for b, (start, end) in enumerate(zip(self._starts, ends, strict=True)):
            mask_BK[b, start:end] = 1
        return Kept(self._cache, shared, mask_BK)

    def keep(
        self,
        cache: LatentCache,
        prompts: Sequence[Prompt],
        starts: Sequence[int],
        kept: Kept | None,
        leads: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Remember a rollout: with `kept` only the reused ids stand in one piece, else row b's begin at `starts[b]`."""
        ids = _leads(prompts, leads)
        if kept is None:
            self._cache, self._ids, self._starts = cache, ids, tuple(starts)
        else:
            self._ids = tuple(row[:count] for row, count in zip(ids, kept.reused, strict=True))


def _leads(prompts: Sequence[Prompt], given: Sequence[tuple[int, ...]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(leading_ids(prompt) for prompt in prompts) if given is None else tuple(given)


def leading_ids(prompt: Prompt) -> tuple[int, ...]:
    """The token ids before the first block of embeddings."""
    out: list[int] = []
    for segment in prompt.segments:
        if not isinstance(segment, tuple):
            break
        out.extend(segment)
    return tuple(out)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same
