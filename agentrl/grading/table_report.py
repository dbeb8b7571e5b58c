"""Many runs of tabular tasks in a few numbers: success rate, and fair means in which failed runs count (MAPPA M-30)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.grading.table_metrics import fair_mean
from agentrl.types import Score

_OF_KIND = {"classification": ("accuracy", "f1", "auc"), "regression": ("rmse_of_range",)}


def table_report(scores: Sequence[Score]) -> dict[str, Any]:
    """`runs success_rate missing`, and `normalised`, each a mean over all runs; per kind of task its runs, its success
    rate and its metrics. `fair` counts a failed run at its fallback, `plain` leaves it out.

    A run has succeeded when its submission could be scored. Missing scores (a rollout or a grader that broke) are
    failed runs too, counted apart; those that do not tell their kind are in no kind's means. A metric that a task does
    not have (AUC of three classes) is in the means of the tasks that have it.
    """
    ok = [bool(score.info.get("metrics")) for score in scores]
    whole = [score.value if good else None for score, good in zip(scores, ok, strict=True)]
    out: dict[str, Any] = {
        "runs": len(scores),
        "success_rate": sum(ok) / len(ok) if ok else None,
        "missing": sum(score.missing for score in scores),
    }
    if scores:
        out["normalised"] = _means(whole, [0.0] * len(whole))
    for kind, names in _OF_KIND.items():
        mine = [score for score in scores if score.info.get("kind") == kind]
        if not mine:
            continue
        good = [bool(score.info["metrics"]) for score in mine]
        out[kind] = {"runs": len(mine), "success_rate": sum(good) / len(good)} | {
            name: found for name in names if (found := _metric(mine, name)) is not None
        }
    return out


def _metric(scores: Sequence[Score], name: str) -> dict[str, float | None] | None:
    having = [s for s in scores if name in s.info["metrics"] or not s.info["metrics"]]
    values = [s.info["metrics"].get(name) for s in having]
    if all(value is None for value in values) and any(s.info["metrics"] for s in scores):
        return None
    return _means(values, [s.info["fallbacks"][name] for s in having])


def _means(values: Sequence[float | None], fallback: Sequence[float]) -> dict[str, float | None]:
    found = fair_mean(values, fallback)
    return {"plain": found.plain, "fair": found.fair}
