"""Metrics of predictions, and what becomes of them over runs of which some failed.

Shapes: C columns, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

FALLBACKS: Mapping[str, float] = MappingProxyType({"accuracy": 0.5, "auc": 0.5, "f1": 0.0, "normalised": 0.0})
"""What a failed run counts as in a fair mean. 0.5 for accuracy is the published one (chance); the others are ours:
chance for AUC, no prediction for F1, no progress for the normalised score. Errors fall back to `trivial_error`."""

_LOG_FLOOR = 1e-15


def label_metrics(truth: Sequence[str | float], predicted: Sequence[str | float]) -> dict[str, float]:
    """`accuracy`, `f1` (of the greater label where there are two, else the mean over classes), `auc` (two classes).

    Where the two classes are 0 and 1, predictions between are scores, and classes from 0.5 on.
    """
    classes = sorted(set(truth), key=lambda label: (isinstance(label, str), label))
    scores = predicted
    if classes == [0.0, 1.0] and all(not isinstance(p, str) and 0 <= p <= 1 for p in predicted):
        predicted = [1.0 if p >= 0.5 else 0.0 for p in predicted]  # type: ignore[operator]  # numbers, as just seen
    pairs = list(zip(truth, predicted, strict=True))
    out = {"accuracy": sum(t == p for t, p in pairs) / len(pairs)}
    wanted = classes[1:] if len(classes) == 2 else classes
    out["f1"] = math.fsum(_f1(pairs, label) for label in wanted) / len(wanted)
    if len(classes) == 2:
        positive = [t == classes[1] for t in truth]
        numeric = all(not isinstance(s, str) for s in scores)
        ranked = [float(s) if numeric else float(s == classes[1]) for s in scores]
        out["auc"] = auc(positive, ranked)
    return out


def number_metrics(truth_CN: NDArray[np.float64], predicted_CN: NDArray[np.float64]) -> dict[str, float]:
    """`rmse`, `mae`, `mse`, `r2`, `rmse_of_range` (a share of the answers' range), `rmsle` where nothing is below 0.

    Several columns: the mean over columns of each.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        error_CN = predicted_CN - truth_CN
        mse_C = (error_CN**2).mean(axis=1)
        spread_C = truth_CN.max(axis=1) - truth_CN.min(axis=1)
        out = {
            "rmse": np.sqrt(mse_C).mean(),
            "mae": np.abs(error_CN).mean(),
            "mse": mse_C.mean(),
            "r2": (1 - mse_C / truth_CN.var(axis=1)).mean(),
            "rmse_of_range": (np.sqrt(mse_C) / spread_C).mean(),
        }
        if min(truth_CN.min(), predicted_CN.min()) >= 0:
            log_CN = np.log1p(predicted_CN) - np.log1p(truth_CN)
            out["rmsle"] = np.sqrt((log_CN**2).mean(axis=1)).mean()
    return {name: float(value) for name, value in out.items()}


def one_hot_metrics(truth_CN: NDArray[np.float64], predicted_CN: NDArray[np.float64]) -> dict[str, float]:
    """`logloss` and `accuracy` of one probability per class where each answer is one class; else, for columns that are
    labels of their own, `accuracy` and `auc` as means over columns."""
    if np.all(truth_CN.sum(axis=0) == 1):
        probability_CN = np.clip(predicted_CN, _LOG_FLOOR, 1.0)
        probability_CN = probability_CN / probability_CN.sum(axis=0)
        right_N = (probability_CN * truth_CN).sum(axis=0)
        hit_N = predicted_CN.argmax(axis=0) == truth_CN.argmax(axis=0)
        return {"logloss": float(-np.log(right_N).mean()), "accuracy": float(hit_N.mean())}
    each = [label_metrics(t.tolist(), p.tolist()) for t, p in zip(truth_CN, predicted_CN, strict=True)]
    shared = set.intersection(*(set(one) for one in each))
    return {name: math.fsum(one[name] for one in each) / len(each) for name in sorted(shared)}


def auc(positive: Sequence[bool], scores: Sequence[float]) -> float:
    """The chance that a positive scores above a negative, ties as one half (Mann-Whitney). NaN without both."""
    num_positive = sum(positive)
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return math.nan
    scores_N = np.asarray(scores, dtype=np.float64)
    _, inverse_N, counts = np.unique(scores_N, return_inverse=True, return_counts=True)
    rank = counts.cumsum() - (counts - 1) / 2  # the mean rank of each tie
    total = float(rank[inverse_N][np.asarray(positive, dtype=bool)].sum())
    return (total - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def trivial_error(truth: Sequence[float]) -> tuple[float, float]:
    """RMSE, and RMSE as a share of the range, of the predictor that always says the answers' mean: what a failed
    regression run counts as in a fair mean."""
    values_N = np.asarray(truth, dtype=np.float64)
    spread = float(values_N.max() - values_N.min())
    rmse = float(values_N.std())
    return rmse, rmse / spread if spread else 0.0


@dataclass(frozen=True, slots=True)
class FairMean:
    """A metric over runs. `plain` is the mean of those that succeeded (None without any), `fair` that of all, each
    failed one at its fallback."""

    plain: float | None
    fair: float
    success_rate: float


def fair_mean(values: Sequence[float | None], fallback: float | Sequence[float]) -> FairMean:
    """`values` is None where a run failed. `fallback` is one number, or one per run where tasks differ (errors).

    Raises `ValueError` without runs, and for unequal lengths.
    """
    if not values:
        raise ValueError("a fair mean needs at least one run")
    given = [fallback] * len(values) if isinstance(fallback, int | float) else list(fallback)
    known = [v for v in values if v is not None]
    filled = [f if v is None else v for v, f in zip(values, given, strict=True)]
    plain = math.fsum(known) / len(known) if known else None
    return FairMean(plain, math.fsum(filled) / len(filled), len(known) / len(values))


def _f1(pairs: Sequence[tuple[str | float, str | float]], label: str | float) -> float:
    hits = sum(t == label and p == label for t, p in pairs)
    stated = sum(p == label for _, p in pairs) + sum(t == label for t, _ in pairs)
    return 2 * hits / stated if stated else 0.0
