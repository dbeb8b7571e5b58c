"""Balanced sampling: how often each of m samples is used so that `target` uses come out (MARS section on balanced
sampling). Advantages are computed before and travel with the samples; a draw returns copy counts only."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def _check(m: int, target: int) -> None:
    if m < 0 or target < 0:
        raise ValueError(f"m and target must not be negative, got {m} and {target}")


def balance_counts(m: int, target: int, rng: random.Random) -> list[int]:
    """Copies of each of `m` samples, summing to `target` (all of one question; [] for m = 0).

    m > target: a uniform draw without replacement. m < target: target // m copies of each, and the remainder drawn
    without replacement, so counts differ by at most 1. m = target: one each. Uniform draws keep the mean advantage
    unbiased. Raises `ValueError` for negative numbers.
    """
    _check(m, target)
    if m == 0:
        return []
    copies, remainder = divmod(target, m)
    counts = [copies] * m
    for i in rng.sample(range(m), remainder):
        counts[i] += 1
    return counts


def weighted_balance_counts(weights: Sequence[float], target: int, rng: random.Random) -> list[int]:
    """Like `balance_counts`, with the draws weighted (|A|) instead of uniform: an ablation, not MARS.

    Successive weighted draws without replacement (Efraimidis and Spirakis, 2006); zero weights come last, uniformly.
    It biases the gradient towards large advantages, as nothing re-weights the kept samples. Raises `ValueError` for
    weights that are negative or not finite.
    """
    m = len(weights)
    _check(m, target)
    if any(not (math.isfinite(w) and w >= 0) for w in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    if m == 0:
        return []
    copies, remainder = divmod(target, m)
    counts = [copies] * m
    keys: list[tuple[bool, float, float]] = []
    for w in weights:
        u, tie = 1.0 - rng.random(), rng.random()
        keys.append((w > 0, math.log(u) / w if w > 0 else 0.0, tie))
    for i in sorted(range(m), key=lambda i: keys[i], reverse=True)[:remainder]:
        counts[i] += 1
    return counts
