"""`agentrl recursivemas sweep`: train and evaluate for each seed and each number of latent steps, in one table.

The proof that links carry information (one recipe, several seeds, controls beside it), and how much they carry
(accuracy by a column of the data against m). Each pair is an ordinary training run and an ordinary evaluation, whose
folders lie beside the sweep's. m = 0 trains nothing: its slots are empty.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.load import dump_yaml
from agentrl.errors import DataError
from agentrl.grading.interval import eval_block
from agentrl.recipes.recursivemas.comparison import RING
from agentrl.recipes.recursivemas.config import RecursiveRecipe
from agentrl.recipes.recursivemas.evaluate import evaluate, held_out_tasks
from agentrl.recipes.recursivemas.train import train
from agentrl.recipes.registry import VerbOptions
from agentrl.run import Run
from agentrl.types import Task


def sweep(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """Returns `rows` (one per m and seed: accuracy, controls, seconds) and writes `table.md`, `plot.png` and the
    summary. Raises as training and evaluation do, and `DataError` for a column that a held-out row lacks."""
    own = recipe.recursivemas.sweep
    tasks = held_out_tasks(recipe)
    column = column_of(own.by, tasks)
    with Run.create(
        recipe.run.dir, recipe.run.name, dump_yaml(recipe), seed=recipe.run.seed, stem="recursivemas-sweep"
    ) as run:
        rows = []
        for steps in own.latent_steps or (recipe.recursivemas.latent_steps,):
            for seed in own.seeds or (recipe.run.seed,):
                options.progress.note(f"m = {steps}, seed {seed}")
                rows.append(one(recipe, options, run.path, steps, seed, column))
        result = {
            "method": "recursivemas",
            "rounds": recipe.recursivemas.rounds,
            "agents": list(recipe.recursivemas.graph.agents),
            "by": own.by,
            "rows": rows,
        }
        run.write_file("table.md", table(rows))
        if own.by is not None:
            run.write_file("plot.png", plot(rows, own.by))
        run.write_summary(result)
    return {"run": str(run.path), "table": "\n" + table(rows).rstrip(), **result}


def column_of(by: str | None, tasks: Sequence[Task]) -> dict[str, str] | None:
    """Task id -> its value in the column; None without one."""
    if by is None:
        return None
    lacking = [task.id for task in tasks if by not in task.info]
    if lacking:
        raise DataError(
            f"recursivemas.sweep.by: {len(lacking)} of {len(tasks)} held-out rows have no column {by!r}, "
            f"{lacking[0]!r} first",
            "name a column of the data, or leave it out",
        )
    return {task.id: str(task.info[by]) for task in tasks}


def one(
    recipe: RecursiveRecipe, options: VerbOptions, folder: Path, steps: int, seed: int, column: Mapping[str, str] | None
) -> dict[str, Any]:
    """Train with `steps` and `seed`, then evaluate. The two runs lie in the sweep's folder."""
    name = f"m{steps}-seed{seed}"
    base = _with(recipe, folder, name, seed, latent_steps=steps)
    links, begin = None, time.perf_counter()
    if steps:
        links = train(base, options)["run"]
    trained = time.perf_counter()
    asked = _with(
        base,
        folder,
        f"{name}-eval",
        seed,
        links=links,
        allow_untrained=links is None or recipe.recursivemas.allow_untrained,
    )
    found = evaluate(asked, options)
    done = time.perf_counter()
    controls = {kind: _brief(block["strict"]) for kind, block in found["controls"].items() if kind != RING}
    row: dict[str, Any] = {
        "latent_steps": steps,
        "seed": seed,
        "eval": _brief(found["eval"]),
        "controls": controls,
        "seconds": {"training": round(trained - begin, 1), "evaluation": round(done - trained, 1)},
    }
    if column is not None:
        row["by"] = by_column(found["eval"], column)
    return row


def by_column(block: Mapping[str, Any], column: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Value of the column -> an evaluation's block over its rows alone."""
    items: dict[str, dict[str, float | None]] = defaultdict(dict)
    for task, score in block["items"].items():
        items[column[task]][task] = score
    return {value: _brief(eval_block(items[value])) for value in sorted(items)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row per m and seed, a column per control or per value of the data's column."""
    values = sorted({value for row in rows for value in row.get("by", {})})
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["controls"]))
    head = ["m", "seed", "ring", *kinds, *values, "training s"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [str(row["latent_steps"]), str(row["seed"]), _share(row["eval"])]
        cells += [_share(row["controls"].get(kind)) for kind in kinds]
        cells += [_share(row.get("by", {}).get(value)) for value in values]
        lines.append("| " + " | ".join([*cells, f"{row['seconds']['training']:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Mapping[str, Any]], by: str) -> bytes:
    """A PNG: accuracy against m, a line per value of the column; the mean over seeds."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for value in sorted({value for row in rows for value in row["by"]}):
        points: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            score = row["by"].get(value, {}).get("score")
            if score is not None:
                points[row["latent_steps"]].append(score)
        steps = sorted(points)
        axes.plot(steps, [sum(points[m]) / len(points[m]) for m in steps], marker="o", label=value)
    axes.set_xlabel("latent steps m")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.02, 1.02)
    axes.legend(title=by)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def _share(block: Mapping[str, Any] | None) -> str:
    score = None if block is None else block["score"]
    return "-" if score is None else f"{score:.3f}"


def _brief(block: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's block without its items, which the evaluation's own folder holds."""
    return {key: value for key, value in block.items() if key != "items"}


def _with(recipe: RecursiveRecipe, folder: Path, name: str, seed: int, **own: Any) -> RecursiveRecipe:
    run = recipe.run.model_copy(update={"dir": str(folder), "name": name, "seed": seed})
    return recipe.model_copy(update={"run": run, "recursivemas": recipe.recursivemas.model_copy(update=own)})
