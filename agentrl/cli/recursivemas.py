"""`agentrl recursivemas`: agents that hand on latent thoughts; only the links between them are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli import console
from agentrl.cli.method import (
    CheckpointOption,
    DebugOption,
    FromRolloutsOption,
    InputOption,
    JsonOption,
    NameOption,
    QuestionOption,
    QuietOption,
    RecipeArgument,
    ResumeOption,
    RunDirOption,
    SeedOption,
    SetOption,
    SmokeOption,
    StepsOption,
    aliases,
    complete_recipe,
    one_question,
    run_verb,
)

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
OptionalRecipe = Annotated[
    str,
    typer.Argument(metavar="[RECIPE]", help="A path or a shipped name.", autocompletion=complete_recipe),
]

app = typer.Typer(
    name="recursivemas",
    help="RecursiveMAS: frozen agents in a ring that pass latent thoughts, trained only through their links.",
    no_args_is_help=True,
)


@app.command("train", help="Train the links.")
def train(
    recipe: RecipeArgument,
    links: LinksOption = None,
    rounds: RoundsOption = None,
    latent_steps: LatentStepsOption = None,
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
        own = _own(links, None, rounds, latent_steps, False)
        overrides = aliases(set_, run__steps=steps, run__dir=run_dir, run__name=name, run__seed=seed, **own)
        talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
        given = {"resume": resume, "from_rollouts": from_rollouts, "run_dir": run_dir, "name": name, **talk}
        run_verb("recursivemas", "train", recipe, overrides, smoke=smoke, **given)


@app.command("eval", help="Evaluate on the held-out tasks, beside the controls.")
def evaluate(
    recipe: RecipeArgument,
    links: LinksOption = None,
    rounds: RoundsOption = None,
    latent_steps: LatentStepsOption = None,
    allow_untrained: UntrainedOption = False,
    controls: ControlsOption = None,
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
        own = _own(links, checkpoint, rounds, latent_steps, allow_untrained)
        own |= {} if controls is None else {"recursivemas__controls": _names(controls)}
        overrides = aliases(set_, run__dir=run_dir, run__name=name, run__seed=seed, **own)
        talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
        given = {"checkpoint": checkpoint, "run_dir": run_dir, "name": name, **talk}
        run_verb("recursivemas", "eval", recipe, overrides, smoke=smoke, **given)


@app.command("infer", help="Answer a question, or a file of them; without either, one of the recipe's own.")
def infer(
    recipe: OptionalRecipe = DEFAULT_RECIPE,
    question: QuestionOption = None,
    input_file: InputOption = None,
    links: LinksOption = None,
    rounds: RoundsOption = None,
    latent_steps: LatentStepsOption = None,
    allow_untrained: UntrainedOption = False,
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
        asked = _asked(question, input_file)
        own = _own(links, checkpoint, rounds, latent_steps, allow_untrained)
        overrides = aliases(set_, run__dir=run_dir, run__name=name, run__seed=seed, **own)
        talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
        given = {"checkpoint": checkpoint, "run_dir": run_dir, "name": name, **asked, **talk}
        run_verb("recursivemas", "infer", recipe, overrides, smoke=smoke, needs_data=not asked, **given)


@app.command("sweep", help="Train and evaluate for each seed and number of latent steps, in one table.")
def sweep(
    recipe: RecipeArgument,
    set_: SetOption = [],  # noqa: B006 - typer reads the default and never changes it
    smoke: SmokeOption = False,
    steps: StepsOption = None,
    run_dir: RunDirOption = None,
    name: NameOption = None,
    quiet: QuietOption = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    with console.session(quiet=quiet, json_output=json_output, debug=debug):
        overrides = aliases(set_, run__steps=steps, run__dir=run_dir, run__name=name)
        talk = {"quiet": quiet, "json_output": json_output, "debug": debug}
        run_verb("recursivemas", "sweep", recipe, overrides, smoke=smoke, run_dir=run_dir, name=name, **talk)


def _asked(question: str | None, input_file: Path | None) -> dict[str, Any]:
    """Nothing where neither is given: the recipe then asks the first of its own questions."""
    return {} if question is None and input_file is None else one_question(question, input_file)


def _names(text: str) -> str | list[str]:
    """`all`, or the names between commas."""
    return text if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


def _own(
    links: str | None, checkpoint: str | None, rounds: int | None, latent_steps: int | None, allow_untrained: bool
) -> dict[str, Any]:
    """The method's flags as config keys. A checkpoint of a run of this method is its links."""
    from agentrl.errors import ConfigError

    if links is not None and checkpoint is not None and links != checkpoint:
        raise ConfigError("--links and --checkpoint name different links", "give one of the two")
    return {
        "recursivemas__links": links if links is not None else checkpoint,
        "recursivemas__rounds": rounds,
        "recursivemas__latent_steps": latent_steps,
        "recursivemas__allow_untrained": True if allow_untrained else None,
    }
