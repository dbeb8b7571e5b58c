"""Several trials of each problem: a mean with its standard error (MAPPA M-28)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def trials_block(scores: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """`score se n trials missing`, and `items`: each problem's mean.

    The score is the mean over problems of their means, and the standard error that of the problems' means, because
    trials of one problem are not independent: sqrt(sum (m_i - m)^2 / (n - 1) / n), None for fewer than two problems.
    Missing scores (None) are left out and counted, and so are problems without any score. `trials` is the number of
    scores that count.
    """
    items = {}
    for name, values in sorted(scores.items()):
        known = [float(v) for v in values if v is not None]
        items[name] = math.fsum(known) / len(known) if known else None
    means = [m for m in items.values() if m is not None]
    n = len(means)
    score = math.fsum(means) / n if n else None
    se = None
    if n > 1 and score is not None:
        se = math.sqrt(math.fsum((m - score) ** 2 for m in means) / (n - 1) / n)
    total = sum(len(v) for v in scores.values())
    missing = sum(v is None for values in scores.values() for v in values)
    return {"score": score, "se": se, "n": n, "trials": total - missing, "missing": missing, "items": items}
