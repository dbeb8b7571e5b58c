"""`agentrl mappa`: teams of agents with weights of their own, trained by a coach's score of every action."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from agentrl.cli.method import alias_keys, method_app
from agentrl.cli.options import add_command, complete_recipe, parameters_of


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


def _coach_eval(
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
    **given: Any,
) -> None:
    if everything and split is not None:
        raise typer.BadParameter("--all scores both splits", param_hint="--split")
    from agentrl.cli.coach_eval import coach_eval

    coach_eval(
        recipe,
        None if coach is None else coach.value,
        given["set_"],
        smoke=given["smoke"],
        flags=alias_keys(given),
        split="all" if everything else "test" if split is None else split.value,
        repeats=repeats,
        talk={key: given[key] for key in ("quiet", "json_output", "debug")},
    )


add_command(
    app,
    "coach-eval",
    "How good is a coach? Let it score recorded actions whose faults are known.",
    _coach_eval,
    takes=frozenset({"seed"}),
    own=parameters_of(_coach_eval),
)
