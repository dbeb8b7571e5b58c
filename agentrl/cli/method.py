"""The commands of a method: from their options to one recipe function.

A flag is only an alias of a config key: it becomes an override that is applied after every `--set`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from agentrl.cli import console
from agentrl.cli.options import OptionalRecipe, RecipeArgument, add_command, parameters_of
from agentrl.cli.summary import show_summary

if TYPE_CHECKING:
    from agentrl.config.load import Loaded


def _no_keys() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Verb:
    """A command of a method.

    `takes` names its options beside those of every command. `own` is a function of the method's options: its
    parameters become the command's, one called as a shared option gets that one's value, and it returns the config
    keys that they stand for (`run__steps` for `run.steps`). With `recipe` the argument may be left out, and with
    `own_questions` the question too.
    """

    name: str
    summary: str
    takes: frozenset[str]
    own: Callable[..., dict[str, Any]] = _no_keys
    recipe: str | None = None
    own_questions: bool = False


TRAIN = Verb("train", "Train by this method.", frozenset({"resume", "steps", "from_rollouts", "seed"}))
EVAL = Verb("eval", "Evaluate on the held-out tasks.", frozenset({"checkpoint", "seed"}))
ROLLOUT = Verb("rollout", "Roll out and record trajectories, without training.", frozenset({"checkpoint", "seed"}))
INFER = Verb(
    "infer", "Answer a question, or a file of them.", frozenset({"question", "input_file", "checkpoint", "seed"})
)

_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "steps": "run__steps",
        "run_dir": "run__dir",
        "name": "run__name",
        "seed": "run__seed",
        "checkpoint": "model__checkpoint",
    }
)
"""Option -> the config key that it is an alias of."""
_TOLD = ("resume", "from_rollouts", "checkpoint", "run_dir", "name", "quiet", "json_output", "debug")
"""The options that the method's function is told of too: fields of `VerbOptions`."""


def method_app(method: str, summary: str, verbs: Sequence[Verb] = (TRAIN, EVAL, ROLLOUT, INFER)) -> typer.Typer:
    """The command group of a method."""
    app = typer.Typer(name=method, help=summary, no_args_is_help=True)
    for verb in verbs:
        _add_verb(app, method, verb)
    return app


def _add_verb(app: typer.Typer, method: str, verb: Verb) -> None:
    own = parameters_of(verb.own)

    def body(recipe: str, **given: Any) -> None:
        if given.get("from_rollouts") is not None and not given["from_rollouts"].is_dir():
            raise typer.BadParameter(f"there is no folder {given['from_rollouts']}", param_hint="--from-rollouts")
        asked = _asked(given, verb.own_questions) if "question" in given else {}
        keys = alias_keys(given) | verb.own(**{name: given[name] for name in own})
        told = {name: given[name] for name in _TOLD if name in given}
        overrides = aliases(given["set_"], keys)
        run_verb(method, verb.name, recipe, overrides, smoke=given["smoke"], needs_data=not asked, **asked, **told)

    annotation, default = (
        (RecipeArgument, inspect.Parameter.empty) if verb.recipe is None else (OptionalRecipe, verb.recipe)
    )
    argument = inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    add_command(app, verb.name, verb.summary, body, takes=verb.takes, own={"recipe": argument, **own})


def alias_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The config keys behind the options that are only aliases of one."""
    return {key: given[option] for option, key in _KEYS.items() if option in given}


def aliases(values: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """`--set` texts followed by the keys that were given; `run__steps` stands for `run.steps`.

    Text is quoted, so that `--name 2024` stays text.
    """
    given = {key.replace("__", "."): value for key, value in keys.items() if value is not None}
    return [*values, *(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())]


def search_current_folder() -> None:
    """Let `module:function` name a user's file in the current folder; it comes last, so it shadows nothing."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def run_verb(
    method: str,
    verb: str,
    recipe: str,
    overrides: Sequence[str],
    *,
    smoke: bool,
    needs_data: bool = True,
    **options: Any,
) -> None:
    """Load, check, then call the method's function and print its summary. `options` are fields of `VerbOptions`."""
    from agentrl.errors import ConfigError
    from agentrl.preflight.check import check, refuse_errors
    from agentrl.recipes.registry import VerbOptions, load_recipe
    from agentrl.recipes.registry import verb as function_of

    search_current_folder()
    loaded = load_recipe(recipe, overrides, smoke)
    if loaded.tree.method != method:
        named = f"agentrl {loaded.tree.method} {verb} {recipe}"
        raise ConfigError(f"{recipe}: a recipe of {loaded.tree.method}, not of {method}", f"run {named}")
    findings = check(loaded, needs_data=needs_data, trains=verb == "train")
    refuse_errors(findings)
    for finding in findings:
        if finding.level == "warning":
            console.note(f"warning: {finding.cause} ({finding.fix})")
    function = function_of(method, verb)  # imports torch: what check refuses is told before
    with console.StepTable() as progress:
        summary = function(loaded.tree, VerbOptions(origins=loaded.origins, progress=progress, **options))
    if console.mode().json_output:
        console.json(summary)
    else:
        show_summary(summary)


def loaded_rows(loaded: Loaded) -> list[tuple[str, str, str]]:
    """(key, value, origin) of everything that is not a default."""
    tree = loaded.tree.model_dump(mode="json")
    rows = []
    for key, origin in loaded.origins.items():
        if origin != "default":
            value: Any = tree
            for part in key.split("."):
                value = value[part] if isinstance(value, dict) and part in value else None
            rows.append((key, json.dumps(value, ensure_ascii=False), origin))
    return rows


def _asked(given: Mapping[str, Any], own_questions: bool) -> dict[str, Any]:
    """Nothing where neither is given and the recipe has questions of its own: it then asks the first of them."""
    question, input_file = given["question"], given["input_file"]
    return {} if own_questions and question is None and input_file is None else one_question(question, input_file)


def one_question(question: str | None, input_file: Path | None) -> dict[str, Any]:
    """Exactly one of the two ways to ask. Raises `ConfigError` or `DataError`."""
    from agentrl.errors import ConfigError, DataError

    if (question is None) == (input_file is None):
        given = "neither" if question is None else "both"
        raise ConfigError(f"infer wants --question or --input, got {given}", "give one: --question 'How far is it?'")
    if question is not None and not question.strip():
        raise ConfigError("--question is empty", "write the question: --question 'How far is it?'")
    if input_file is not None and not input_file.is_file():
        raise DataError(f"--input: there is no file {input_file}", "name a file of questions (.jsonl, .json or .csv)")
    return {"question": question, "input_file": input_file}
