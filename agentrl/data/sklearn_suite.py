"""The suite `dsbench-sklearn`: scikit-learn's own data sets as modelling tasks, laid out as DSBench lays out its own.

Nothing is downloaded. Each task is a data set, a target and a split of its rows, whose shuffled ids say nothing of
their class. The baseline is the constant that knows the training rows alone (the majority class, the mean), and the
best known is the better of a linear model and a forest fitted on the training rows, both measured on the hidden rows.
Training and held-out tasks share no data set.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.data.dsbench import ANSWERS, SAMPLE, TEST, TRAIN, dsbench_tasks
from agentrl.errors import ConfigError
from agentrl.files import home, install_folder
from agentrl.types import Task

NAME = "dsbench-sklearn"
_VERSION = 1  # of what is written; another one is prepared anew
_HIDDEN_SHARE = 0.3
_SEED = 20260131

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """`target` makes the answer of a row; `drop` are columns that would tell it. `kind` decides the metric."""

    dataset: str
    name: str
    kind: str
    target: Callable[[Row], Any]
    column: str
    drop: tuple[str, ...]
    story: str
    split: str = "train"
    resplits: int = 2


PROBLEMS: tuple[Problem, ...] = (
    Problem("iris", "species", "classification", lambda r: r["class"], "species", (),
            "Tell the species of an iris from four measures of its flower, in cm."),
    Problem("iris", "petal-width", "regression", lambda r: r["petal width (cm)"], "petal_width", ("petal width (cm)",),
            "Predict the width of an iris's petal, in cm, from the other measures of its flower."),
    Problem("breast_cancer", "diagnosis", "classification", lambda r: r["class"], "diagnosis", (),
            "Tell malignant from benign tumours by thirty measures of the nuclei of their cells."),
    Problem("breast_cancer", "concavity", "regression", lambda r: r["worst concavity"], "concavity",
            ("worst concavity",), "Predict the worst concavity of a tumour's nuclei from the other measures."),
    Problem("digits", "digit", "classification", lambda r: int(r["class"]), "digit", (),
            "Tell which digit was written by hand, from the brightness (0 to 16) of 8 x 8 pixels."),
    Problem("digits", "odd", "classification", lambda r: "odd" if int(r["class"]) % 2 else "even", "parity", (),
            "Tell whether a digit written by hand is odd or even, from the brightness of 8 x 8 pixels."),
    Problem("diabetes", "progression", "regression", lambda r: r["class"], "progression", (),
            "Predict how far a patient's diabetes has got after a year, from ten measures at its beginning."),
    Problem("diabetes", "fast", "classification", lambda r: "fast" if r["class"] > 140 else "slow", "course", (),
            "Tell whether a patient's diabetes will take a fast or a slow course, from ten measures at its beginning."),
    Problem("wine", "cultivar", "classification", lambda r: r["class"], "cultivar", (),
            "Tell which of three cultivars a wine is made of, from thirteen chemical measures.", "eval"),
    Problem("wine", "strong", "classification", lambda r: int(r["alcohol"] >= 13), "strong", ("alcohol",),
            "Tell whether a wine is strong (1) or light (0), from twelve chemical measures.", "eval"),
    Problem("wine", "alcohol", "regression", lambda r: r["alcohol"], "alcohol", ("alcohol",),
            "Predict the alcohol of a wine, in percent, from twelve other chemical measures.", "eval"),
    Problem("wine", "proline", "regression", lambda r: r["proline"], "proline", ("proline",),
            "Predict the proline in a wine, in mg/l, from twelve other chemical measures.", "eval"),
)  # fmt: skip


def sizes() -> dict[str, int]:
    """Split -> number of tasks."""
    found = {split: sum(p.resplits for p in PROBLEMS if p.split == split) for split in ("train", "eval")}
    return found


def prepared() -> Path:
    """The suite's folder, made where it is not there yet (some seconds). Raises `MissingError` on a full disk."""
    return install_folder(home() / "data" / f"{NAME}-{_VERSION}", write)


def generate(split: str, n: int, seed: int = 0) -> list[Task]:
    """The first `n` tasks of a split, those of both kinds by turns; always the same ones, whatever the seed.

    Raises `ConfigError` when the split has fewer than `n`.
    """
    tasks = dsbench_tasks(prepared(), split)
    if n > len(tasks):
        raise ConfigError(f"data.limit: {n} is more than the {len(tasks)} {split} tasks", "lower data.limit")
    kinds = {kind: [t for t in tasks if t.info["kind"] == kind] for kind in ("classification", "regression")}
    place = {t.id: (i + 0.5) / len(mine) for mine in kinds.values() for i, t in enumerate(mine)}
    return sorted(tasks, key=lambda task: place[task.id])[:n]


def write(folder: Path) -> None:
    """Write the whole suite into a folder."""
    tables: dict[str, list[dict[str, Any]]] = {}
    specs: dict[str, dict[str, Any]] = {}
    for problem in PROBLEMS:
        if problem.dataset not in tables:
            tables[problem.dataset] = _rows(problem.dataset)
        for number in range(1, problem.resplits + 1):
            name = f"{problem.dataset}-{problem.name}-{number}"
            specs[name] = _write_task(folder, name, problem, tables[problem.dataset])
    (folder / "tasks.json").write_text(json.dumps(specs, indent=2) + "\n", "utf-8")


def _rows(dataset: str) -> list[dict[str, Any]]:
    """A data set's rows: its columns, and `class` with the label's name or the number to predict."""
    from sklearn import datasets

    found = vars(datasets)[f"load_{dataset}"]()
    columns = [str(name).replace(",", " ") for name in found["feature_names"]]
    labels = found.get("target_names")
    named = labels is not None and len(labels) and dataset != "diabetes"
    return [
        {c: float(v) for c, v in zip(columns, values, strict=True)}
        | {"class": str(labels[int(target)]) if named else float(target)}
        for values, target in zip(found["data"], found["target"], strict=True)
    ]


def _write_task(folder: Path, name: str, problem: Problem, table: Sequence[Row]) -> dict[str, Any]:
    rng = random.Random(f"{_SEED}/{name}")
    order = rng.sample(range(len(table)), len(table))
    ids = rng.sample(range(1, 10 * len(table)), len(table))
    features = [c for c in table[0] if c != "class" and c not in problem.drop]
    rows = [(ids[i], [table[i][c] for c in features], problem.target(table[i])) for i in order]
    cut = round(len(rows) * _HIDDEN_SHARE)
    hidden, known = rows[:cut], rows[cut:]
    baseline, best = _bounds(problem.kind, known, hidden)
    constant = known[0][2]
    files: dict[str, tuple[list[str], list[list[Any]]]] = {
        f"data/data_resplit/{name}/{TRAIN}": (["id", *features, problem.column], [[i, *x, y] for i, x, y in known]),
        f"data/data_resplit/{name}/{TEST}": (["id", *features], [[i, *x] for i, x, _ in hidden]),
        f"data/data_resplit/{name}/{SAMPLE}": (["id", problem.column], [[i, constant] for i, _, _ in hidden]),
        f"data/answers/{name}/{ANSWERS}": (["id", problem.column], [[i, y] for i, _, y in hidden]),
    }
    for path, (header, lines) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *lines])
    (folder / "data/task").mkdir(exist_ok=True)
    (folder / f"data/task/{name}.txt").write_text(f"{problem.story} The column to predict is {problem.column}.\n")
    for which, value in (("baseline", baseline), ("GT", best)):
        place = folder / "save_performance" / which / name
        place.mkdir(parents=True)
        (place / "result.txt").write_text(f"{value!r}\n")
    metric = "accuracy" if problem.kind == "classification" else "rmse"
    return {"kind": problem.kind, "metric": metric, "split": problem.split, "dataset": problem.dataset}


def _bounds(kind: str, known: Sequence[Any], hidden: Sequence[Any]) -> tuple[float, float]:
    """The metric on the hidden rows of the constant, and of the better of two models."""
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.linear_model import Ridge, RidgeClassifier
    from sklearn.metrics import accuracy_score, root_mean_squared_error
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classes = kind == "classification"
    forest = (RandomForestClassifier if classes else RandomForestRegressor)(n_estimators=30, random_state=0)
    linear = make_pipeline(StandardScaler(), RidgeClassifier() if classes else Ridge())
    constant = DummyClassifier() if classes else DummyRegressor()
    x, y = [row[1] for row in known], [row[2] for row in known]
    x_hidden, y_hidden = [row[1] for row in hidden], [row[2] for row in hidden]
    measure = accuracy_score if classes else root_mean_squared_error
    base, *others = (float(measure(y_hidden, m.fit(x, y).predict(x_hidden))) for m in (constant, linear, forest))
    return base, max(others) if classes else min(others)
