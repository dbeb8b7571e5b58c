"""`agentrl mappa coach-eval` from its options to its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.cli import console
from agentrl.cli.method import aliases, search_current_folder

COLUMNS = (
    "coach",
    "AUC (95%)",
    "right",
    "wrong",
    "blame (95%)",
    "apart",
    "rank",
    "missing",
    "unreadable",
    "plea",
    "raised",
    "bias",
    "calls",
    "tokens",
    "USD",
    "s",
)
_MEANING = """\
right, wrong: mean score of the right and of the wrong actions. blame: the culprit scores lowest; by chance {chance}.
apart, rank: between repeats, mean difference in points and rank correlation. missing, unreadable: share of the scores.
plea: what asking for a high score changes, in points; raised: share of actions it lifts by a point or more.
bias: the furthest that a kind of task lies from the others, in points, right and wrong actions weighing the same."""


def coach_eval(
    recipe: str | None,
    coach: str | None,
    overrides: Sequence[str],
    *,
    smoke: bool,
    flags: Mapping[str, Any],
    split: str,
    repeats: int,
    talk: Mapping[str, Any],
) -> None:
    """Load the recipe, or the one that stands in where none is named, measure its coach, and print the result."""
    from agentrl.errors import ConfigError
    from agentrl.recipes.mappa.actions.store import FOLDER
    from agentrl.recipes.mappa.coach_defaults import chosen_kind, section_overrides
    from agentrl.recipes.registry import VerbOptions, load_recipe, verb

    search_current_folder()
    kind = coach or (chosen_kind(overrides) if recipe is None else None)
    base = [] if kind is None else section_overrides(kind)
    source = recipe or str(FOLDER / "computing.yaml")
    loaded = load_recipe(source, [*base, *aliases(overrides, flags)], smoke)
    if loaded.tree.method != "mappa":
        raise ConfigError(f"{source}: a recipe of {loaded.tree.method}, which has no coach", "name a recipe of mappa")
    function = verb("mappa", "coach-eval")
    with console.StepTable() as progress:
        options = VerbOptions(origins=loaded.origins, progress=progress, split=split, repeats=repeats, **talk)
        summary = function(loaded.tree, options)
    if console.mode().json_output:
        console.json(summary)
    else:
        _show(summary)


def _show(summary: Mapping[str, Any]) -> None:
    coaches = summary["coaches"]
    own = coaches[summary["coach"]]
    sizes = f"{summary['repeats']} repeats, {summary['injections']} pleas"
    title = f"{summary['actions']} actions ({summary['split']}), {sizes}"
    console.table(COLUMNS, [_row(name, block) for name, block in coaches.items()], title)
    for line in _MEANING.format(chance=_number(own["blame"]["chance"])).splitlines():
        console.out(line)
    kinds = [(k, s["n"], _number(s["mean"]), _signed(s["bias"])) for k, s in own["strata"].items()]
    console.table(("kind of task", "actions", "mean", "bias"), kinds, summary["coach"])
    offsets = json.dumps(summary["calibration"]["offsets"])
    console.out(f"to even the kinds out: coach.stratum={summary['calibration']['stratum']} coach.offsets={offsets}")
    for reason, count in own["missing"]["reasons"].items():
        console.out(f"missing {count}: {reason}")
    console.out(f"run: {summary['run']}")
    console.out(f"plot: {summary['plot']}")


def _row(name: str, block: Mapping[str, Any]) -> tuple[str, ...]:
    cost, agreement, injection = block["cost"], block["agreement"], block["injection"]
    return (
        name,
        _with_interval(block["auc"]),
        _number(block["mean_right"]),
        _number(block["mean_wrong"]),
        _with_interval(block["blame"]),
        _number(agreement["difference"]),
        _number(agreement["rank"]),
        f"{block['missing']['share']:.0%}",
        f"{block['missing']['unreadable']:.0%}",
        _signed(injection["change"]),
        "-" if injection["raised"] is None else f"{injection['raised']:.0%}",
        _number(block["bias_max"]),
        str(cost["calls"]),
        str(cost["input_tokens"] + cost["output_tokens"]),
        f"{cost['cost_usd']:.4g}",
        f"{cost['seconds']:.1f}",
    )


def _with_interval(block: Mapping[str, Any]) -> str:
    if block["low"] is None:
        return _number(block["value"])
    return f"{_number(block['value'])} ({block['low']:.2f} to {block['high']:.2f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
