"""A submission of predictions against hidden answers, both CSV, as DSBench scores its modelling tasks.

Rows are joined by id, never by place. A submission that lacks rows, has rows of its own, repeats one, or predicts no
finite number where one is needed has failed, with the reason; it is not cut down to what fits. The task's score is
max(0, (p - b) / (g - b)) with the metric's value p, the baseline's b and the best known g (DSBench, arXiv 2409.07703).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.columns import Kind, as_number, task_kind
from agentrl.grading.table_metrics import FALLBACKS, label_metrics, number_metrics, one_hot_metrics, trivial_error
from agentrl.types import Score, Task, Trajectory

_WHOLE = re.compile(r"[+-]?\d{1,18}(?:\.0*)?")
_NOTHING = ("nan", "+nan", "-nan", "none", "null", "na")

_CAPS = ((0.75, 9), (0.5, 8), (0.25, 6), (0.05, 4))
_LOWEST_CAP = 3
_SKILL = "of the way from a constant prediction to a perfect one"


class TableError(ValueError):
    """The submission cannot be scored: a failed run, with the reason."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How a task is scored. `id_column` None is the answers' first column, no `targets` all the others. Without a
    `metric` it is accuracy for classification and RMSE for regression. `baseline` and `best` are in its unit."""

    id_column: str | None = None
    targets: tuple[str, ...] = ()
    metric: str | None = None
    kind: Kind | None = None
    baseline: float | None = None
    best: float | None = None


@dataclass(frozen=True, slots=True)
class TableResult:
    """`value` is the metric's, `normalised` the task's score (None without baseline and best); both None, and `metrics`
    empty, for a submission that failed, whose `reason` tells why."""

    kind: Kind
    metric: str
    value: float | None
    normalised: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def ok(self) -> bool:
        return self.value is not None


@dataclass(frozen=True, slots=True)
class _Table:
    """Columns by name, and the row of each id."""

    columns: Mapping[str, list[str]]
    rows: Mapping[str, int]


def score_table(submission: str, answers: str, spec: TableSpec) -> TableResult:
    """Score a submission. Raises `ValueError` when the answers or the spec are at fault."""
    header, rows = _read(answers, "the answers")
    id_column = spec.id_column or header[0]
    targets = spec.targets or tuple(name for name in header if name != id_column)
    if not targets or any(name not in header for name in (id_column, *targets)):
        raise ValueError(f"the answers have the columns {header}, not {[id_column, *targets]}")
    truth = _table(header, rows, id_column, "the answers")
    columns = [truth.columns[name] for name in targets]
    kind = spec.kind or task_kind(columns)
    metric = spec.metric or ("accuracy" if kind == "classification" else "rmse")
    by_label = kind == "classification" and len(targets) == 1
    truth_CN = None if by_label else _numbers(columns, "the answers")
    try:
        predicted = _joined(submission, truth, id_column, targets)
        metrics = _metrics(columns[0] if truth_CN is None else truth_CN, predicted, kind)
    except TableError as error:
        return TableResult(kind, metric, None, None, reason=str(error))
    if metric not in metrics:
        raise ValueError(f"no metric {metric!r} for {kind} of {len(targets)} columns; there are {sorted(metrics)}")
    value = metrics[metric]
    if not math.isfinite(value):
        return TableResult(kind, metric, None, None, reason=f"{metric} of these predictions is not finite")
    whole = None
    if spec.baseline is not None and spec.best is not None:
        whole = normalised_score(value, spec.baseline, spec.best)
    finite = {name: one for name, one in metrics.items() if math.isfinite(one)}
    return TableResult(kind, metric, value, whole, finite)


def normalised_score(value: float | None, baseline: float, best: float) -> float:
    """max(0, (p - b) / (g - b)), for metrics that should rise and for those that should fall; 0 for None or NaN.

    Not cut at 1: a submission may beat the best known. Raises `ValueError` where baseline and best are equal.
    """
    if not (math.isfinite(baseline) and math.isfinite(best)) or baseline == best:
        raise ValueError(f"baseline and best must be finite and differ, got {baseline} and {best}")
    if value is None or not math.isfinite(value):
        return 0.0
    return max(0.0, (value - baseline) / (best - baseline))


class TableGrader:
    """A `Reward`: the normalised score of the CSV text that is the trajectory's answer; a failed one is a true 0.

    The task's `info` holds `answers` (CSV text) or `answers_file`, and the fields of a `TableSpec`, of which
    `baseline` and `best` are needed. Missing where the task is at fault.
    """

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if trajectory.status == "failed":
            return Score(None, f"rollout failed: {trajectory.status_reason}")
        try:
            spec = spec_of(task.info)
            if spec.baseline is None or spec.best is None:
                return Score(None, "grader failed: the task has no baseline and best")
            text = _hidden(task.info)
            result = score_table(trajectory.answer or "", text, spec)
        except (ValueError, KeyError, TypeError, OSError) as error:
            return Score(None, f"grader failed: {type(error).__name__}: {error}")
        info = {
            "kind": result.kind,
            "metric": result.metric,
            "metrics": dict(result.metrics),
            "fallbacks": fallbacks(text, spec, result.kind),
        }
        if result.normalised is None:
            return Score(0.0, result.reason if trajectory.answer else "no answer", info)
        return Score(result.normalised, f"{result.metric} {result.value:.6g}", info)


def measured(submission: str | None, info: Mapping[str, Any]) -> str | None:
    """A submission's metrics on a task's hidden answers in words, for a coach that may know them; None for a task
    without such answers, and for one at fault."""
    if not ("answers" in info or "answers_file" in info):
        return None
    if submission is None:
        return "there is no submission yet"
    try:
        result = score_table(submission, _hidden(info), spec_of(info))
    except (ValueError, KeyError, TypeError, OSError):
        return None
    if not result.ok:
        return f"the submission cannot be scored: {result.reason}"
    values = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    score = (
        "" if result.normalised is None else f"; normalised score {result.normalised:.3f} (0 baseline, 1 best known)"
    )
    gained = skill(result.value, _hidden(info), spec_of(info))
    cap = "" if gained is None else f"; {gained:.2f} {_SKILL}: score at most {score_cap(gained)}"
    return f"the submission on the hidden answers: {values}{score}{cap}"


def skill(value: float | None, answers: str, spec: TableSpec) -> float | None:
    """Where a metric's value lies between a trivial predictor's (the most frequent label, the mean), 0, and a perfect
    one's, 1, in whatever metric and for either kind of task. None where the two are equal or not finite."""
    header, rows = _read(answers, "the answers")
    id_column = spec.id_column or header[0]
    places = [i for i, name in enumerate(header) if name != id_column and (not spec.targets or name in spec.targets)]
    columns = [[row[i] for row in rows] for i in places]
    kind = spec.kind or task_kind(columns)
    if kind == "classification" and len(columns) == 1:
        trivial = [Counter(columns[0]).most_common(1)[0][0]]
    else:
        trivial = [repr(math.fsum(map(float, column)) / len(column)) for column in columns]
    constant = [[*row] for row in rows]
    for row in constant:
        for i, text in zip(places, trivial, strict=True):
            row[i] = text
    low, high = (score_table(_as_csv([header, *made]), answers, spec).value for made in (constant, rows))
    if value is None or low is None or high is None or low == high:
        return None
    return (value - low) / (high - low)


def score_cap(gained: float) -> int:
    """The most that a coach should give whoever submitted this (MAPPA X-02): one ladder for all tasks, by `skill`, so
    that a mean and a majority class earn the same little. The published caps, by accuracy and by RMSE, do not."""
    return next((cap for least, cap in _CAPS if gained >= least), _LOWEST_CAP)


def _as_csv(rows: Sequence[Sequence[str]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _hidden(info: Mapping[str, Any]) -> str:
    answers = info.get("answers")
    return Path(info["answers_file"]).read_text("utf-8") if answers is None else str(answers)


def fallbacks(answers: str, spec: TableSpec, kind: Kind) -> dict[str, float]:
    """What a failed run counts as in the fair means of a task: the fixed ones of its kind, and for errors the constant
    mean's (`trivial_error`, over several columns the mean of it)."""
    if kind == "classification":
        return {name: FALLBACKS[name] for name in ("normalised", "accuracy", "f1", "auc")}
    header, rows = _read(answers, "the answers")
    id_column = spec.id_column or header[0]
    targets = spec.targets or tuple(name for name in header if name != id_column)
    errors = [trivial_error([float(row[header.index(name)]) for row in rows]) for name in targets]
    rmse, of_range = (math.fsum(values) / len(errors) for values in zip(*errors, strict=True))
    return {"normalised": FALLBACKS["normalised"], "rmse": rmse, "rmse_of_range": of_range}


def spec_of(info: Mapping[str, Any]) -> TableSpec:
    """The spec that a task's info holds."""
    names = ("id_column", "metric", "kind", "baseline", "best")
    return TableSpec(targets=tuple(info.get("targets") or ()), **{n: info[n] for n in names if n in info})


def _read(text: str, what: str) -> tuple[list[str], list[list[str]]]:
    try:
        lines = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        raise TableError(f"{what} cannot be read as CSV: {error}") from error
    lines = [line for line in lines if any(cell.strip() for cell in line)]
    if len(lines) < 2:
        raise TableError(f"{what} have no rows")
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    if len(set(header)) < len(header):
        raise TableError(f"{what} repeat a column: {header}")
    for place, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise TableError(f"line {place} of {what} has {len(row)} cells for {len(header)} columns")
    return header, rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], id_column: str, what: str) -> _Table:
    columns = {name: [row[i].strip() for row in rows] for i, name in enumerate(header)}
    found: dict[str, int] = {}
    for place, raw in enumerate(columns[id_column]):
        key = _id(raw)
        if key in found:
            raise TableError(f"{what} repeat the id {raw!r}")
        found[key] = place
    return _Table(columns, found)


def _joined(submission: str, truth: _Table, id_column: str, targets: Sequence[str]) -> list[list[str]]:
    """The submission's predictions per target, in the order of the answers' rows."""
    header, rows = _read(submission, "the submission")
    names = {name.casefold(): name for name in header}
    ids = names.get(id_column.casefold())
    if ids is None:
        raise TableError(f"the submission has no column {id_column!r}; it has {header}")
    others = [name for name in header if name != ids]
    wanted = [names.get(target.casefold()) for target in targets]
    if wanted == [None] and len(others) == 1:
        wanted = list(others)  # one target and one column: its name is of no matter
    for target, name in zip(targets, wanted, strict=True):
        if name is None:
            raise TableError(f"the submission has no column {target!r}; it has {header}")
    table = _table(header, rows, ids, "the submission")
    missing = [key for key in truth.rows if key not in table.rows]
    extra = [key for key in table.rows if key not in truth.rows]
    if missing:
        raise TableError(f"the submission lacks {len(missing)} of {len(truth.rows)} rows, such as id {missing[0]!r}")
    if extra:
        raise TableError(f"the submission has {len(extra)} rows that nobody asked for, such as id {extra[0]!r}")
    order = [table.rows[key] for key in truth.rows]
    return [[table.columns[name][i] for i in order] for name in wanted if name is not None]


def _metrics(
    truth: Sequence[str] | NDArray[np.float64], predicted: Sequence[Sequence[str]], kind: Kind
) -> dict[str, float]:
    for column in predicted:
        if any(not value or value.casefold() in _NOTHING for value in column):
            raise TableError("the submission has empty or NaN predictions")
    if not isinstance(truth, np.ndarray):
        return label_metrics([_label(v) for v in truth], [_label(v) for v in predicted[0]])
    predicted_CN = _numbers(predicted, "the submission")
    return number_metrics(truth, predicted_CN) if kind == "regression" else one_hot_metrics(truth, predicted_CN)


def _numbers(columns: Sequence[Sequence[str]], what: str) -> NDArray[np.float64]:
    """The columns as (C, N). Raises `TableError` for what is no finite number."""
    for value in (value for column in columns for value in column):
        number = as_number(value)
        if number is None or not math.isfinite(number):
            raise TableError(f"{what} have {value[:40]!r} where a finite number is needed")
    return np.array([[float(value) for value in column] for column in columns])


def _label(value: str) -> str | float:
    """A label as it is compared: numbers by value, the rest by their words."""
    number = as_number(value)
    return value.casefold() if number is None or not math.isfinite(number) else number


def _id(value: str) -> str:
    """An id as it is compared: 7, 7.0 and 007 are one id."""
    return str(int(value.split(".")[0])) if _WHOLE.fullmatch(value) else value
