"""How much gradient each part of a batch gives, read off the accumulators between the parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


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
            before = self._before[name].flatten()
            added = grad.flatten() - before
            square += float(torch.dot(added, added))
            shared += float(torch.dot(added, before))
        self.norms[part] = math.sqrt(square)
        if len(self._parts) == 2:
            norms = self.norms[self._parts[0]] * self.norms[part]
            self.cosine = shared / norms if norms > 0 else None


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors, in fp32."""
    if not tensors:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors.values()])))
