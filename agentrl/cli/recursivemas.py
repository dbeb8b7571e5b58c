"""`agentrl recursivemas`: agents that hand on latent thoughts; only the links between them are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from agentrl.cli.method import EVAL, INFER, TRAIN, Verb, method_app

DEFAULT_RECIPE = "embedded-ring"
LinksOption = Annotated[
    str | None, typer.Option("--links", metavar="DIR", help="A folder, a run or a shipped name; recursivemas.links.")
]
RoundsOption = Annotated[int | None, typer.Option("--rounds", metavar="N", help="Alias of recursivemas.rounds.")]
LatentStepsOption = Annotated[
    int | None, typer.Option("--latent-steps", metavar="N", help="Alias of recursivemas.latent_steps.")
]
UntrainedOption = Annotated[
    bool, typer.Option("--allow-untrained", help="Think through links of random weights; their answers mean nothing.")
]
ControlsOption = Annotated[
    str | None,
    typer.Option(
        "--controls", metavar="NAMES", help="all, or some of single,text,none,zero,shuffled; recursivemas.controls."
    ),
]


def _train_keys(
    links: LinksOption = None, rounds: RoundsOption = None, latent_steps: LatentStepsOption = None
) -> dict[str, Any]:
    return {
        "recursivemas__links": links,
        "recursivemas__rounds": rounds,
        "recursivemas__latent_steps": latent_steps,
    }


def _infer_keys(
    checkpoint: str | None,
    links: LinksOption = None,
    rounds: RoundsOption = None,
    latent_steps: LatentStepsOption = None,
    allow_untrained: UntrainedOption = False,
) -> dict[str, Any]:
    """A checkpoint of a run of this method is its links; the models are as they came."""
    from agentrl.errors import ConfigError

    if links is not None and checkpoint is not None and links != checkpoint:
        raise ConfigError("--links and --checkpoint name different links", "give one of the two")
    return {
        **_train_keys(checkpoint if links is None else links, rounds, latent_steps),
        "recursivemas__allow_untrained": True if allow_untrained else None,
        "model__checkpoint": None,
    }


def _eval_keys(
    checkpoint: str | None,
    links: LinksOption = None,
    rounds: RoundsOption = None,
    latent_steps: LatentStepsOption = None,
    allow_untrained: UntrainedOption = False,
    controls: ControlsOption = None,
) -> dict[str, Any]:
    named = {} if controls is None else {"recursivemas__controls": _names(controls)}
    return _infer_keys(checkpoint, links, rounds, latent_steps, allow_untrained) | named


def _names(text: str) -> str | list[str]:
    """`all`, or the names between commas."""
    return text if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


app = method_app(
    "recursivemas",
    "RecursiveMAS: frozen agents in a ring that pass latent thoughts, trained only through their links.",
    (
        replace(TRAIN, summary="Train the links.", own=_train_keys),
        replace(EVAL, summary="Evaluate on the held-out tasks, beside the controls.", own=_eval_keys),
        replace(
            INFER,
            summary="Answer a question, or a file of them; without either, one of the recipe's own.",
            own=_infer_keys,
            recipe=DEFAULT_RECIPE,
            own_questions=True,
        ),
        Verb(
            "sweep",
            "Train and evaluate for each seed and number of latent steps, in one table.",
            frozenset({"resume", "steps"}),
        ),
    ),
)
