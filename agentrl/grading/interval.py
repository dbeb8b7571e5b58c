"""How sure a score is: binomial intervals, and the paired rise from one evaluation to the next.

Missing scores (None) are left out of every number and counted apart: missing is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_RESAMPLES = 10_000
_CELLS = 4_000_000  # resampled scores held at once


def wilson(k: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of k successes in n trials; z = 1.96 gives 95%.

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), Wilson 1927. Without trials it is (0, 1).
    """
    if not 0 <= k <= n:
        raise ValueError(f"{k} successes in {n} trials")
    if n == 0:
        return 0.0, 1.0
    p = k / n
    middle = p + z * z / (2 * n)
    width = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if k == 0 else (middle - width) / scale
    high = 1.0 if k == n else (middle + width) / scale
    return low, high


def eval_block(items: Mapping[str, float | None]) -> dict[str, Any]:
    """One evaluation as the summary holds it: `score n k low high items`, and `missing`.

    `score` is the mean, `k` counts the full marks (1.0). The interval is Wilson's when every score is 0 or 1, else a
    bootstrap of the mean. Without any score `score`, `low` and `high` are None.
    """
    known = {name: float(score) for name, score in sorted(items.items()) if score is not None}
    values = np.array(list(known.values()), dtype=np.float64)
    n, k = len(values), int((values == 1.0).sum())
    score: float | None = None
    low: float | None = None
    high: float | None = None
    if n:
        score = float(values.mean())
        low, high = wilson(k, n) if set(known.values()) <= {0.0, 1.0} else _bootstrap(values, seed=0)
    return {"score": score, "n": n, "k": k, "low": low, "high": high, "missing": len(items) - n, "items": dict(items)}


def paired_rise(
    before: Mapping[str, float | None], after: Mapping[str, float | None], *, seed: int = 0
) -> dict[str, Any]:
    """The mean rise over the items that both evaluations scored, with its 95% paired bootstrap interval.

    Items, with both of their scores, are drawn with replacement (Efron and Tibshirani 1993, chapter 8); percentiles
    of the mean difference. The draw is fixed by `seed` and does not depend on the items' order. Without common items
    every value is None and `n` 0.
    """
    common = sorted(name for name, score in before.items() if score is not None and after.get(name) is not None)
    if not common:
        return {"value": None, "low": None, "high": None, "n": 0}
    rises = np.array([float(after[name]) - float(before[name]) for name in common])  # type: ignore[arg-type]
    low, high = _bootstrap(rises, seed=seed)
    return {"value": float(rises.mean()), "low": low, "high": high, "n": len(common)}


def _bootstrap(values: np.ndarray, *, seed: int) -> tuple[float, float]:
    """The 2.5% and 97.5% percentiles of the mean of `values` (N,) drawn with replacement."""
    draw = np.random.default_rng(seed)
    rows = max(1, _CELLS // len(values))
    means = [
        values[draw.integers(0, len(values), (min(rows, _RESAMPLES - done), len(values)))].mean(axis=1)
        for done in range(0, _RESAMPLES, rows)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)
