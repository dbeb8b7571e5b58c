"""How good scores are, measured against labels: separation, blame, agreement, bias per kind of task, resistance, cost.

Every number is over the scores that are there; what is missing is counted beside it, with its reasons. Intervals are
95% percentiles of a bootstrap over trajectories, whose actions belong together (Efron and Tibshirani 1993).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.recipes.mappa.actions.store import Label, RecordedAction
from agentrl.types import Score

_RESAMPLES = 1_000
_UNREADABLE = "unreadable reply"
Value = float | None


@dataclass(frozen=True, slots=True)
class Scored:
    """One coach's scores: `repeats[r][i]` of action i, `attacked` action id -> its score with a plea added.

    `seconds` is the wall time of all of them.
    """

    repeats: tuple[tuple[Score, ...], ...]
    attacked: Mapping[str, Score]
    seconds: float

    @property
    def all(self) -> list[Score]:
        return [score for repeat in self.repeats for score in repeat] + list(self.attacked.values())


def quality(actions: Sequence[RecordedAction], labels: Mapping[str, Label], scored: Scored) -> dict[str, Any]:
    """Everything that is reported of one coach."""
    means = {a.id: _mean([r[i].value for r in scored.repeats]) for i, a in enumerate(actions)}
    right = {a.id: labels[a.id].right for a in actions}
    strata = bias(actions, right, means)
    missing = [score for repeat in scored.repeats for score in repeat if score.missing]
    asked = sum(map(len, scored.repeats))
    return {
        "auc": separation(actions, right, means),
        "mean_right": _mean([means[i] for i, ok in right.items() if ok]),
        "mean_wrong": _mean([means[i] for i, ok in right.items() if not ok]),
        "blame": blame(actions, labels, means),
        "agreement": agreement(scored.repeats),
        "missing": {
            "share": len(missing) / asked,
            "unreadable": sum(_UNREADABLE in (score.reason or "") for score in missing) / asked,
            "n": len(missing),
            "of": asked,
            "reasons": dict(Counter(_short(score.reason) for score in missing).most_common(8)),
        },
        "injection": resistance(actions, means, scored.attacked),
        "strata": strata,
        "bias_max": max((abs(s["bias"]) for s in strata.values() if s["bias"] is not None), default=None),
        "cost": cost(scored),
    }


def auc(right: Sequence[float], wrong: Sequence[float]) -> Value:
    """The chance that a right action scores above a wrong one, ties half: the area under the ROC curve."""
    if not len(right) or not len(wrong):
        return None
    difference_RW = np.asarray(right)[:, None] - np.asarray(wrong)[None, :]
    return float(((difference_RW > 0) + 0.5 * (difference_RW == 0)).mean())


def separation(
    actions: Sequence[RecordedAction], right: Mapping[str, bool], means: Mapping[str, Value]
) -> dict[str, Any]:
    """AUC of the mean scores, with its interval and how many actions of either kind have a score."""
    known = [(a.trajectory, right[a.id], float(v)) for a in actions if (v := means[a.id]) is not None]

    def of(rows: Sequence[tuple[str, bool, float]]) -> Value:
        return auc([s for _, ok, s in rows if ok], [s for _, ok, s in rows if not ok])

    low, high = _interval([[row for row in known if row[0] == name] for name in dict.fromkeys(r[0] for r in known)], of)
    counts = Counter(ok for _, ok, _ in known)
    return {"value": of(known), "low": low, "high": high, "right": counts[True], "wrong": counts[False]}


def blame(actions: Sequence[RecordedAction], labels: Mapping[str, Label], means: Mapping[str, Value]) -> dict[str, Any]:
    """How often the agent that scores lowest in a faulty trajectory is the one to blame; ties share. One whose agents
    have no score counts as not found. `chance` is what a blind guess gets."""
    teams: dict[str, list[RecordedAction]] = {}
    for action in actions:
        if labels[action.id].culprit is not None:
            teams.setdefault(action.trajectory, []).append(action)
    found, chance = [], []
    for mine in teams.values():
        scores: dict[str, list[float]] = {}
        for action in mine:
            if (value := means[action.id]) is not None:
                scores.setdefault(action.agent, []).append(value)
        agents = {agent: statistics.fmean(values) for agent, values in scores.items()}
        lowest = [agent for agent, value in agents.items() if value == min(agents.values())]
        found.append(1 / len(lowest) if labels[mine[0].id].culprit in lowest else 0.0)
        chance.append(1 / len({action.agent for action in mine}))
    low, high = _interval([[x] for x in found], _mean)
    return {"value": _mean(found), "low": low, "high": high, "n": len(found), "chance": _mean(chance)}


def agreement(repeats: Sequence[Sequence[Score]]) -> dict[str, Any]:
    """Between pairs of repeats: mean absolute difference in points, rank correlation (Spearman's; none where a repeat
    is constant), and the share of equal scores. None of them with one repeat."""
    apart, ranks, same = [], [], []
    for one, two in combinations(repeats, 2):
        pairs = [
            (a.value, b.value) for a, b in zip(one, two, strict=True) if a.value is not None and b.value is not None
        ]
        if pairs:
            apart.append(statistics.fmean(abs(a - b) for a, b in pairs))
            same.append(sum(a == b for a, b in pairs) / len(pairs))
            ranks.append(spearman([a for a, _ in pairs], [b for _, b in pairs]))
    return {"difference": _mean(apart), "rank": _mean(ranks), "equal": _mean(same), "repeats": len(repeats)}


def spearman(one: Sequence[float], two: Sequence[float]) -> Value:
    """Pearson's correlation of mean ranks; None where one of them has a single value."""
    x, y = _ranks(one), _ranks(two)
    if not x.std() or not y.std():
        return None
    return float(np.corrcoef(x, y)[0, 1])


def bias(
    actions: Sequence[RecordedAction], right: Mapping[str, bool], means: Mapping[str, Value]
) -> dict[str, dict[str, Any]]:
    """Per kind of task: `mean`, in which right and wrong actions weigh the same however many there are; `bias`, its
    distance from the mean of the other kinds; `offset`, what evens the means out. None without scores of both."""
    out: dict[str, dict[str, Any]] = {}
    for kind in sorted({a.stratum for a in actions}):
        mine = [(right[a.id], v) for a in actions if a.stratum == kind and (v := means[a.id]) is not None]
        sides = [_mean([v for ok, v in mine if ok is side]) for side in (True, False)]
        out[kind] = {"n": len(mine), "mean": None if None in sides else _mean(sides)}
    whole = [block["mean"] for block in out.values() if block["mean"] is not None]
    for block in out.values():
        mean = block["mean"]
        alone = mean is None or len(whole) < 2
        block["bias"] = None if alone else mean - (sum(whole) - mean) / (len(whole) - 1)
        block["offset"] = None if alone else statistics.fmean(whole) - mean
    return out


def resistance(
    actions: Sequence[RecordedAction], means: Mapping[str, Value], attacked: Mapping[str, Score]
) -> dict[str, Any]:
    """What a plea for a high score, added to an action, changes: the mean `change` in points with its interval, and the
    share `raised` by a point or more. `missing` counts those without a score before or after."""
    changes = [
        after - before
        for action in actions
        if action.id in attacked
        and (after := attacked[action.id].value) is not None
        and (before := means[action.id]) is not None
    ]
    low, high = _interval([[x] for x in changes], _mean)
    return {
        "change": _mean(changes),
        "low": low,
        "high": high,
        "raised": _mean([float(x >= 1) for x in changes]),
        "n": len(changes),
        "missing": len(attacked) - len(changes),
    }


def cost(scored: Scored) -> dict[str, Any]:
    """Calls, tokens and price of everything asked, attacks included, and the seconds that it took."""
    infos = [score.info for score in scored.all]
    total = {key: sum(info.get(key, 0) for info in infos) for key in ("calls", "input_tokens", "output_tokens")}
    return {**total, "cost_usd": sum(info.get("cost_usd", 0.0) for info in infos), "seconds": scored.seconds}


def _interval(clusters: Sequence[Sequence[Any]], of: Callable[[Sequence[Any]], Value]) -> tuple[Value, Value]:
    """Percentiles of `of` over clusters drawn with replacement, always the same draw; None where there are too few."""
    if len(clusters) < 2:
        return None, None
    draw = np.random.default_rng(0).integers(0, len(clusters), (_RESAMPLES, len(clusters)))
    values = [v for picks in draw.tolist() if (v := of([row for i in picks for row in clusters[i]])) is not None]
    if not values:
        return None, None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """1 for the smallest; equal values share their mean rank."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[:, None] > array[None, :]).sum(1)
    ranks: NDArray[np.float64] = below + ((array[:, None] == array[None, :]).sum(1) + 1) / 2
    return ranks


def _mean(values: Sequence[Value]) -> Value:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _short(reason: str | None) -> str:
    return " ".join((reason or "no reason given").split())[:120]
