"""What the commands of every method share: their options, and the way from options to one recipe function.

A flag is only an alias of a config key: it becomes an override that is applied after every `--set`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli import console
from agentrl.cli.summary import show_summary

if TYPE_CHECKING:
    from agentrl.config.load import Loaded


def complete_recipe(incomplete: str) -> list[str]:
    """Shell completion: shipped names."""
    from agentrl.config.shipped import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Shell completion of `--set`: the keys that all methods share."""
    from agentrl.config.explain import all_keys
    from agentrl.config.schema import BaseRecipe
    from agentrl.config.source import dotted

    keys = (dotted(key) + "=" for key in all_keys(BaseRecipe))
    return [key for key in keys if key.startswith(incomplete) and "NAME" not in key]


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A path or a shipped name.", autocompletion=complete_recipe)
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a config key; the value is YAML.", autocompletion=complete_key
    ),
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="The same recipe cut down to run on any CPU.")]
RunDirOption = Annotated[str | None, typer.Option("--run-dir", metavar="DIR", help="Alias of run.dir.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Alias of run.name.")]
SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Alias of run.seed.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No notes and no progress.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, logs on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Full traces.")]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="RUN|DIR[@STEP]", help="Alias of model.checkpoint.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run of this name.")]
StepsOption = Annotated[int | None, typer.Option("--steps", metavar="N", help="Alias of run.steps.")]
FromRolloutsOption = Annotated[
    Path | None, typer.Option("--from-rollouts", metavar="DIR", help="Train on recorded rollouts.")
]
QuestionOption = Annotated[str | None, typer.Option("--question", metavar="TEXT", help="One question.")]
InputOption = Annotated[Path | None, typer.Option("--input", metavar="FILE", help="A file of questions.")]


def aliases(values: Sequence[str], **flags: str | int | list[str] | None) -> list[str]:
    """`--set` texts followed by the flags that were given; `run__steps=3` stands for `run.steps=3`.

    Text is quoted, so that `--name 2024` stays text.
    """
    given = {key.replace("__", "."): value for key, value in flags.items() if value is not None}
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
    function = function_of(method, verb)
    findings = check(loaded, needs_data=needs_data, trains=verb == "train")
    refuse_errors(findings)
    for finding in findings:
        if finding.level == "warning":
            console.note(f"warning: {finding.cause} ({finding.fix})")
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


def method_app(method: str, summary: str) -> typer.Typer:
    """The command group of a method with the verbs that all methods share: train, eval, infer and rollout."""
    app = typer.Typer(name=method, help=summary, no_args_is_help=True)
    _add_train(app, method)
    _add_frozen(app, method, "eval", "Evaluate on the held-out tasks.")
    _add_frozen(app, method, "rollout", "Roll out and record trajectories, without training.")
    _add_infer(app, method)
    return app


def _add_train(app: typer.Typer, method: str) -> None:
    @app.command("train", help="Train by this method.")
    def train(
        recipe: RecipeArgument,
        set_: SetOption = [],  # noqa: B006 - typer reads the default and never changes it
        smoke: SmokeOption = False,
        resume: ResumeOption = False,
        steps: StepsOption = None,
        from_rollouts: FromRolloutsOption = None,
        run_dir: RunDirOption = None,
        name: NameOption = None,
        seed: SeedOption = None,
        quiet: QuietOption = False,
        json_output: JsonOption = False,
        debug: DebugOption = False,
    ) -> None:
        with console.session(quiet=quiet, json_output=json_output, debug=debug):
            if from_rollouts is not None and not from_rollouts.is_dir():
                raise typer.BadParameter(f"there is no folder {from_rollouts}", param_hint="--from-rollouts")
            overrides = aliases(set_, run__steps=steps, run__dir=run_dir, run__name=name, run__seed=seed)
            talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
            given = {"resume": resume, "from_rollouts": from_rollouts, "run_dir": run_dir, "name": name, **talk}
            run_verb(method, "train", recipe, overrides, smoke=smoke, **given)


def _add_frozen(app: typer.Typer, method: str, verb: str, summary: str) -> None:
    @app.command(verb, help=summary)
    def command(
        recipe: RecipeArgument,
        set_: SetOption = [],  # noqa: B006 - typer reads the default and never changes it
        smoke: SmokeOption = False,
        checkpoint: CheckpointOption = None,
        run_dir: RunDirOption = None,
        name: NameOption = None,
        seed: SeedOption = None,
        quiet: QuietOption = False,
        json_output: JsonOption = False,
        debug: DebugOption = False,
    ) -> None:
        with console.session(quiet=quiet, json_output=json_output, debug=debug):
            keys = {"run__dir": run_dir, "run__name": name, "run__seed": seed, "model__checkpoint": checkpoint}
            talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
            given = {"checkpoint": checkpoint, "run_dir": run_dir, "name": name, **talk}
            run_verb(method, verb, recipe, aliases(set_, **keys), smoke=smoke, **given)


def _add_infer(app: typer.Typer, method: str) -> None:
    @app.command("infer", help="Answer a question, or a file of them.")
    def infer(
        recipe: RecipeArgument,
        question: QuestionOption = None,
        input_file: InputOption = None,
        set_: SetOption = [],  # noqa: B006 - typer reads the default and never changes it
        smoke: SmokeOption = False,
        checkpoint: CheckpointOption = None,
        run_dir: RunDirOption = None,
        name: NameOption = None,
        seed: SeedOption = None,
        quiet: QuietOption = False,
        json_output: JsonOption = False,
        debug: DebugOption = False,
    ) -> None:
        with console.session(quiet=quiet, json_output=json_output, debug=debug):
            asked = one_question(question, input_file)
            keys = {"run__dir": run_dir, "run__name": name, "run__seed": seed, "model__checkpoint": checkpoint}
            talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
            given = {"checkpoint": checkpoint, "run_dir": run_dir, "name": name, **asked, **talk}
            run_verb(method, "infer", recipe, aliases(set_, **keys), smoke=smoke, needs_data=False, **given)


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
