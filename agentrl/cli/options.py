"""The options of the commands, each written once, and the builder that gives a command those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from agentrl.cli import console


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
OptionalRecipe = Annotated[
    str, typer.Argument(metavar="[RECIPE]", help="A path or a shipped name.", autocompletion=complete_recipe)
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a config key; the value is YAML.", autocompletion=complete_key
    ),
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="The same recipe cut down to run on any CPU.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, logs on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Full traces.")]
_QuestionOption = Annotated[str | None, typer.Option("--question", metavar="TEXT", help="One question.")]
_InputOption = Annotated[Path | None, typer.Option("--input", metavar="FILE", help="A file of questions.")]
_ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run of this name.")]
_StepsOption = Annotated[int | None, typer.Option("--steps", metavar="N", help="Alias of run.steps.")]
_FromRolloutsOption = Annotated[
    Path | None, typer.Option("--from-rollouts", metavar="DIR", help="Train on recorded rollouts.")
]
_CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="RUN|DIR[@STEP]", help="Alias of model.checkpoint, or recursivemas.links."),
]
_RunDirOption = Annotated[str | None, typer.Option("--run-dir", metavar="DIR", help="Alias of run.dir.")]
_NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Alias of run.name.")]
_SeedOption = Annotated[int | None, typer.Option("--seed", metavar="N", help="Alias of run.seed.")]
_QuietOption = Annotated[bool, typer.Option("--quiet", help="No notes and no progress.")]

_OPTIONS: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "question": (_QuestionOption, None),
        "input_file": (_InputOption, None),
        "set_": (SetOption, []),
        "smoke": (SmokeOption, False),
        "resume": (_ResumeOption, False),
        "steps": (_StepsOption, None),
        "from_rollouts": (_FromRolloutsOption, None),
        "checkpoint": (_CheckpointOption, None),
        "run_dir": (_RunDirOption, None),
        "name": (_NameOption, None),
        "seed": (_SeedOption, None),
        "quiet": (_QuietOption, False),
        "json_output": (JsonOption, False),
        "debug": (DebugOption, False),
    }
)
"""Name -> (annotation, default), in the order that help lists them in. A command's own stand after the questions."""
_ALWAYS = frozenset({"set_", "smoke", "run_dir", "name", "quiet", "json_output", "debug"})


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's parameters, their annotations evaluated; `**given` is left out."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def add_command(
    app: typer.Typer,
    name: str,
    summary: str,
    body: Callable[..., None],
    *,
    takes: frozenset[str] = frozenset(),
    own: Mapping[str, inspect.Parameter],
) -> None:
    """Add a command that takes its `own` options, those that every command of a method has, and `takes` of the rest.

    `body` gets each by its name, within the console's session. An own parameter called `recipe` is its argument.
    """
    rest = {key: value for key, value in own.items() if key != "recipe" and key not in _OPTIONS}
    shared = {
        key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, (annotation, default) in _OPTIONS.items()
        if key in _ALWAYS | takes
    }
    first = [own["recipe"], *(shared.pop(key) for key in ("question", "input_file") if key in shared)]

    def command(**given: Any) -> None:
        talk = {key: given[key] for key in ("quiet", "json_output", "debug")}
        with console.session(**talk):
            body(**given)

    command.__signature__ = inspect.Signature([*first, *rest.values(), *shared.values()])  # type: ignore[attr-defined]
    app.command(name, help=summary)(command)
