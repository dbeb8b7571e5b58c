"""How much gradient each part of a batch gives, read off the accumulators between the parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16


class PartGradients:
    """Norms of what each part added to `grads`, and the cosine of two parts (None for more, or where one is zero).

    A part's gradient is the difference to what stood there before it, so taking statistics changes no training. The
    sum before a part is kept once, and only when another part follows; no other copy is made.
    """

    def __init__(self, grads: Mapping[str, Tensor], parts: Sequence[str]) -> None:
        self.norms: dict[str, float] = {}
        self.cosine: float | None = None
        self._grads = grads
        self._parts = tuple(parts)
        self._before: dict[str, Tensor] = {}

    def close(self, part: str) -> None:
        """To be called when a part's rows are done, in the order of `parts`."""
        if self._before:
            self._difference(part)
        else:
            self.norms[part] = global_norm(self._grads)
        if part != self._parts[-1]:
            self._before = {n: g.clone() for n, g in self._grads.items()}
        else:
            self._before = {}

    def _difference(self, part: str) -> None:
        square = shared = 0.0
        for name, grad in self._grads.items():
            added = grad - self._before[name]
            square += inner(added, added)
            shared += inner(added, self._before[name])
        self.norms[part] = math.sqrt(square)
        if len(self._parts) == 2:
            norms = self.norms[self._parts[0]] * self.norms[part]
            self.cosine = shared / norms if norms > 0 else None


def inner(a: Tensor, b: Tensor) -> float:
    """The inner product of two fp32 tensors of one shape: blocks in fp32, summed in fp64. One fp32 sum over the 28
    million numbers of an embedding is off by a thousandth."""
    blocks = zip(a.flatten().split(_BLOCK), b.flatten().split(_BLOCK), strict=True)
    return float(torch.stack([torch.dot(x, y) for x, y in blocks]).double().sum())


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors; not finite where one of their numbers is not."""
    return math.sqrt(sum(inner(t, t) for t in tensors.values()))
