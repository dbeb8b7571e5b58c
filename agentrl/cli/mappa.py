"""`agentrl mappa`: teams of agents with weights of their own, trained by a coach's score of every action."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from agentrl.cli import console
from agentrl.cli.method import (
    DebugOption,
    JsonOption,
    NameOption,
    QuietOption,
    RunDirOption,
    SeedOption,
    SetOption,
    SmokeOption,
    complete_recipe,
    method_app,
)


class CoachKind(Enum):
    """The coaches that coach-eval knows by a word."""

    RULES = "rules"
    LOCAL = "local"
    ENDPOINT = "endpoint"
    CONSTANT = "constant"
    RANDOM = "random"


class Split(Enum):
    """The two parts of the recorded actions."""

    TEST = "test"
    DEV = "dev"


app = method_app("mappa", "MAPPA: a team of agents, each action scored by a coach, each agent with its own weights.")


@app.command("coach-eval", help="How good is a coach? Let it score recorded actions whose faults are known.")
def coach_eval_command(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="A recipe whose coach is measured.",
            autocompletion=complete_recipe,
            show_default=False,
        ),
    ] = None,
    coach: Annotated[
        CoachKind | None,
        typer.Option("--coach", help="A coach by a word, instead of the recipe's. Without both: rules."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Score both splits, not the test split alone.")] = False,
    split: Annotated[Split | None, typer.Option("--split", help="The test split if not set.")] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Times that each action is scored.")
    ] = 2,
    set_: SetOption = [],  # noqa: B006 - typer reads the default and never changes it
    smoke: SmokeOption = False,
    run_dir: RunDirOption = None,
    name: NameOption = None,
    seed: SeedOption = None,
    quiet: QuietOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    with console.session(quiet=quiet, json_output=json_output, debug=debug):
        if everything and split is not None:
            raise typer.BadParameter("--all scores both splits", param_hint="--split")
        from agentrl.cli.coach_eval import coach_eval

        coach_eval(
            recipe,
            None if coach is None else coach.value,
            set_,
            smoke=smoke,
            flags={"run__dir": run_dir, "run__name": name, "run__seed": seed},
            split="all" if everything else "test" if split is None else split.value,
            repeats=repeats,
            talk={"quiet": quiet, "json_output": json_output, "debug": debug},
        )
