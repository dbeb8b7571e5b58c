"""Tasks from a folder laid out as DSBench's modelling part (arXiv 2409.07703).

    data/task/NAME.txt                          what is asked
    data/data_resplit/NAME/                     train.csv, test.csv, sample_submission.csv: the agents' files
    data/answers/NAME/test_answer.csv           the hidden answers, which no agent is given
    save_performance/{baseline,GT}/NAME/result.txt   the metric's value of a baseline, and the best known
    evaluation/NAME_eval.py                     names the metric and the column; it is read, never run
    tasks.json                                  optional, ours: {NAME: {metric, kind, id_column, targets, split, ...}}

The folder that holds `data` and the folder `data` itself may both be named. Without splits in tasks.json, four tasks of
each kind are held out, by a hash of their names (MAPPA trains on 64 and holds out 4 + 4).
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.data.columns import Kind, task_kind
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task

TRAIN, TEST, SAMPLE, ANSWERS = "train.csv", "test.csv", "sample_submission.csv", "test_answer.csv"
SPLITS = ("train", "eval")
_HELD_OUT_OF_A_KIND = 4
_ROWS_LOOKED_AT = 20_000
_KEYS = frozenset(("metric", "kind", "id_column", "targets", "baseline", "best", "split", "dataset"))
_LAYOUT = "it needs data/task/NAME.txt, data/data_resplit/NAME/train.csv and data/answers/NAME/test_answer.csv"
_TARGET = re.compile(r"""['"]--value['"].*?default\s*=\s*['"]([^'"]+)['"]""")
_PERFORMANCE = re.compile(r"^\s*performance\s*=\s*(.+)$", re.MULTILINE)
# What stands after `performance =` in the benchmark's scripts -> our name of the metric; the first that fits counts.
_METRICS = (
    (r"(?:np\.)?sqrt\(\s*mean_squared_log_error\(|rmsle\(|root_mean_squared_log_error\(", "rmsle"),
    (r"(?:np\.)?sqrt\(\s*mean_squared_error\(|rmse\(|root_mean_squared_error\(", "rmse"),
    (r"mean_squared_error\([^)]*squared\s*=\s*False", "rmse"),
    (r"mean_squared_error\(", "mse"),
    (r"mean_absolute_error\(", "mae"),
    (r"roc_auc_score\((?![^)]*multi_class)", "auc"),
    (r"accuracy_score\(", "accuracy"),
    (r"f1_score\((?![^)]*average)|f1_score\([^)]*macro", "f1"),
    (r"log_loss\(", "logloss"),
    (r"r2_score\(", "r2"),
)
_NOTE = """\

Files: train.csv has the rows to learn from, test.csv those to predict, sample_submission.csv the form of the answer.
Write submission.csv with the columns {columns}: one row for every row of test.csv, by its {id_column}. \
The score is by {metric}."""


def dsbench_tasks(root: Path, split: str | None = None) -> list[Task]:
    """The tasks of a folder, by name; `split` takes those to train on or those held out, None all.

    `Task.files` are what agents get. `Task.info` holds what `grading.tabular` scores by, and `kind`. Raises `DataError`
    for a folder of another layout, a task without its files, and one with a baseline whose metric nobody names.
    """
    if split is not None and split not in SPLITS:
        raise ConfigError(f"data.split: {split!r} is no split of a DSBench folder", f"use {' or '.join(SPLITS)}")
    base = root / "data" if (root / "data").is_dir() else root
    names = sorted(path.stem for path in (base / "task").glob("*.txt"))
    if not names:
        raise DataError(f"{root}: no DSBench folder", _LAYOUT)
    given = _given(base.parent, root, names)
    tasks = [_task(base, name, given.get(name, {})) for name in names if given.get(name, {}) is not None]
    chosen = {task.id: split_of for task, split_of in zip(tasks, _splits(tasks), strict=True)}
    return [task for task in tasks if split is None or chosen[task.id] == split]


def _given(outer: Path, root: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What tasks.json says of each task; null leaves one out."""
    path = next((p for p in (root / "tasks.json", outer / "tasks.json") if p.is_file()), None)
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: broken JSON: {error}", "mend it") from error
    if not isinstance(found, dict) or any(not isinstance(v, dict | None) for v in found.values()):
        raise DataError(f"{path}: not an object of objects", "write {NAME: {metric: ..., kind: ...}}")
    for name, spec in found.items():
        if name not in names:
            raise DataError(f"{path}: there is no task {name!r}", f"there are {', '.join(names[:5])}, ...")
        unknown = set(spec or ()) - _KEYS
        if unknown:
            raise DataError(f"{path}: {name}: unknown key {sorted(unknown)[0]!r}", f"use {', '.join(sorted(_KEYS))}")
    return found


def _task(base: Path, name: str, given: Mapping[str, Any]) -> Task:
    folder, answers = base / "data_resplit" / name, base / "answers" / name / ANSWERS
    if not folder.is_dir() and (base / name).is_dir():
        folder = base / name
    needed = [folder / TRAIN, folder / TEST, answers]
    for path in needed:
        if not path.is_file():
            raise DataError(f"{path}: no such file (task {name})", _LAYOUT)
    script = _script(base, name)
    header, columns = _answers(answers)
    id_column = given.get("id_column") or header[0]
    named = given.get("targets") or ([script["target"]] if script.get("target") in header else None)
    targets = list(named or (column for column in header if column != id_column))
    for column in (id_column, *targets):
        if column not in header:
            raise DataError(f"{answers}: no column {column!r}; it has {header}", "name them in tasks.json")
    kind: Kind = given.get("kind") or task_kind([columns[header.index(t)] for t in targets])
    baseline, best = (
        given.get(key, _result(base, which, name)) for key, which in (("baseline", "baseline"), ("best", "GT"))
    )
    metric = given.get("metric") or script.get("metric")
    if metric is None:
        if baseline is not None:
            raise DataError(
                f"{base}: nothing names the metric of task {name}, whose baseline is {baseline}",
                f'write tasks.json beside data: {{"{name}": {{"metric": "rmse"}}}}, or null to leave the task out',
            )
        metric = "accuracy" if kind == "classification" else "rmse"
    info = {
        "kind": kind,
        "metric": metric,
        "id_column": id_column,
        "targets": targets,
        "baseline": baseline,
        "best": best,
        "dataset": given.get("dataset", name),
        "split": given.get("split"),
        "answers_file": str(answers),
    }
    files = [path for path in (folder / TRAIN, folder / TEST, folder / SAMPLE) if path.is_file()]
    asked = (base / "task" / f"{name}.txt").read_text("utf-8", errors="replace").strip()
    note = _NOTE.format(columns=", ".join([id_column, *targets]), id_column=id_column, metric=metric)
    return Task(name, f"{asked}\n{note}", files=tuple(map(str, files)), info=info)


def _answers(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the columns of the hidden answers, as many rows of them as tell what kind they are."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = islice((row for row in csv.reader(file, strict=True) if any(row)), _ROWS_LOOKED_AT)
            rows = [[cell.strip() for cell in row] for row in lines]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no CSV: {error}", "get the file again") from error
    if len(rows) < 2 or len(rows[0]) < 2 or any(len(row) != len(rows[0]) for row in rows):
        raise DataError(f"{path}: not a table of ids and answers", "get the file again")
    return rows[0], [list(column) for column in zip(*rows[1:], strict=True)]


def _result(base: Path, which: str, name: str) -> float | None:
    places = [outer / "save_performance" / which / name / "result.txt" for outer in (base.parent, base)]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        return None
    try:
        return float(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: no number", "mend it, or name it in tasks.json") from error


def _script(base: Path, name: str) -> dict[str, str]:
    """The target's column and the metric that the benchmark's own script names, as far as it can be read."""
    path = next((p for p in (o / "evaluation" / f"{name}_eval.py" for o in (base.parent, base)) if p.is_file()), None)
    if path is None:
        return {}
    text = path.read_text("utf-8", errors="replace")
    target, performance = _TARGET.search(text), _PERFORMANCE.findall(text)
    metric = next((m for p, m in _METRICS if performance and re.match(p, performance[-1])), None)
    return ({"target": target[1]} if target else {}) | ({"metric": metric} if metric else {})


def _splits(tasks: list[Task]) -> list[str]:
    """The split of each task: its own, or four of each kind held out where none has one."""
    if any(task.info["split"] is not None for task in tasks):
        return [task.info["split"] or "train" for task in tasks]
    held: set[str] = set()
    for kind in ("classification", "regression"):
        mine = [task.id for task in tasks if task.info["kind"] == kind]
        held |= set(sorted(mine, key=lambda n: hashlib.sha256(n.encode()).hexdigest())[:_HELD_OUT_OF_A_KIND])
    return ["eval" if task.id in held else "train" for task in tasks]
