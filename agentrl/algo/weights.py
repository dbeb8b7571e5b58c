"""Weights that turn the sum -sum_t w_t * surrogate_t into a mean: per sequence or over tokens.

Both take one entry per sample of one set (policy, role and optimiser mini-batch): the number of trained tokens, and
how many copies the sample counts for (balanced sampling; 0 = dropped; 1/parts for a split trajectory). The result is
the weight of each trained token of that sample. Repeating the whole set changes no mean.

A sample without a trained token is absent: it has weight 0 and does not enter the denominator. A missing reward thus
does not shrink the others' gradient, whereas a sample with advantage 0 is present and does count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def _check(num_trained: Sequence[int], copies: Sequence[float]) -> None:
    if len(num_trained) != len(copies):
        raise ValueError(f"one count of copies per sample: {len(num_trained)} samples, {len(copies)} counts")
    if any(n < 0 for n in num_trained) or any(not (math.isfinite(c) and c >= 0) for c in copies):
        raise ValueError("token counts and copies must be finite and not negative")


def sequence_mean_weights(num_trained: Sequence[int], copies: Sequence[float]) -> list[float]:
    """copies_i / (sum of copies * |y_i|): mean over samples of the mean over each sample's tokens (MARS Eq. 6-7).

    Raises `ValueError` for sequences of unequal length or negative numbers.
    """
    _check(num_trained, copies)
    total = math.fsum(c for n, c in zip(num_trained, copies, strict=True) if n)
    return [c / (total * n) if n and c else 0.0 for n, c in zip(num_trained, copies, strict=True)]


def token_mean_weights(num_trained: Sequence[int], copies: Sequence[float]) -> list[float]:
    """copies_i / (sum of copies_j * |y_j|): mean over all trained tokens, so longer samples count more.

    Raises `ValueError` for sequences of unequal length or negative numbers.
    """
    _check(num_trained, copies)
    total = math.fsum(c * n for n, c in zip(num_trained, copies, strict=True))
    return [c / total if n and c else 0.0 for n, c in zip(num_trained, copies, strict=True)]
