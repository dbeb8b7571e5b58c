"""`agentrl recursivemas sweep`: train and evaluate for each seed and each number of latent steps, in one table.

The proof that links carry information (one recipe, several seeds, controls beside it), and how much they carry
(accuracy by a column of the data against m). Each pair is a cell: an ordinary training run and an ordinary evaluation,
whose folders lie in the sweep's, and one line of its `rows.jsonl` once both are done. `--resume` goes on with the cells
that have no line, and with the training of one that broke off. m = 0 trains nothing: its slots are empty.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.load import dump_yaml
from agentrl.errors import DataError
from agentrl.files import append, encode, read_lines
from agentrl.grading.interval import eval_block
from agentrl.recipes.recursivemas.comparison import RING
from agentrl.recipes.recursivemas.config import SweepConfig
from agentrl.recipes.recursivemas.evaluate import evaluate, held_out_tasks
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.train import train
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.resuming import approve
from agentrl.run import Run
from agentrl.types import Task

ROWS = "rows.jsonl"
_FREE = ("recursivemas.sweep.latent_steps", "recursivemas.sweep.seeds")  # more cells, or fewer
_BOUND = ("run.steps", "engine.", "optim.")  # a cell that is done would not be trained on


def sweep(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """Returns `rows` (one per m and seed: accuracy, controls, seconds) and writes `table.md`, `plot.png` and the
    summary. Raises as training and evaluation do, `DataError` for a column that a held-out row lacks, and on resume
    `ConfigError` for a config that would make the rows of before and after it incomparable."""
    own = recipe.recursivemas.sweep
    column = column_of(own.by, held_out_tasks(recipe))
    with Run.create(
        recipe.run.dir,
        recipe.run.name,
        dump_yaml(recipe),
        options.resume,
        recipe.run.seed,
        stem="recursivemas-sweep",
        approve=approve(recipe, options.progress, free=_FREE, bound=_BOUND),
    ) as run:
        rows = rows_of(recipe, options, run, column)
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


def rows_of(
    recipe: RecursiveRecipe, options: VerbOptions, run: Run, column: Mapping[str, str] | None
) -> list[dict[str, Any]]:
    """A row per cell in the recipe's order; those that `rows.jsonl` holds already are taken from there."""
    path, found = run.path / ROWS, {}
    for row in read_lines(path):
        found[row["latent_steps"], row["seed"]] = row
    if path.exists():  # without the line that a kill may have torn
        run.write_file(ROWS, b"".join(encode(row) + b"\n" for row in found.values()))
    own = recipe.recursivemas.sweep
    steps = own.latent_steps or (recipe.recursivemas.latent_steps,)
    cells = list(dict.fromkeys((m, seed) for m in steps for seed in own.seeds or (recipe.run.seed,)))
    for m, seed in cells:
        if (m, seed) in found:
            options.progress.note(f"m = {m}, seed {seed}: done before")
            continue
        options.progress.note(f"m = {m}, seed {seed}")
        found[m, seed] = one(recipe, options, run.path, m, seed, column)
        append(path, encode(found[m, seed]) + b"\n", durable=True)
    return [found[cell] for cell in cells]


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
    """Train with `steps` and `seed`, then evaluate. The two runs lie in the sweep's folder; a training that broke off
    goes on from its last checkpoint, an evaluation that did begins again."""
    name = f"m{steps}-seed{seed}"
    base = _with(recipe, folder, name, seed, latent_steps=steps, sweep=SweepConfig())
    links = train(base, replace(options, resume=(folder / name).exists()))["run"] if steps else None
    shutil.rmtree(folder / f"{name}-eval", ignore_errors=True)
    asked = _with(
        base,
        folder,
        f"{name}-eval",
        seed,
        links=links,
        allow_untrained=links is None or recipe.recursivemas.allow_untrained,
    )
    found = evaluate(asked, options)
    controls = {kind: _brief(block["strict"]) for kind, block in found["controls"].items() if kind != RING}
    row: dict[str, Any] = {
        "latent_steps": steps,
        "seed": seed,
        "eval": _brief(found["eval"]),
        "controls": controls,
        "seconds": {"training": training_seconds(links), "evaluation": round(found["seconds"]["total"], 1)},
    }
    if column is not None:
        row["by"] = by_column(found["eval"], column)
    return row


def training_seconds(run: str | None) -> float:
    """The wall seconds of the updates that led to a run's links; loading and evaluations left out."""
    lines = [] if run is None else read_lines(Path(run) / "metrics.jsonl")
    return round(sum(float(line["time/update"]) for line in lines), 1)


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
