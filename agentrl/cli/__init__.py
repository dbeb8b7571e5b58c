"""The command line. Importing it imports typer only: `--help` answers at once, bodies import what they need."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from agentrl import __version__
from agentrl.cli import console
from agentrl.cli.mappa import app as mappa_app
from agentrl.cli.mars import app as mars_app
from agentrl.cli.options import DebugOption, JsonOption, RecipeArgument, SetOption, SmokeOption
from agentrl.cli.recursivemas import app as recursivemas_app


class ContractGroup(TyperGroup):
    """The root group: a usage fault is told in the same two lines as every other, and an interrupt exits with 130."""

    def main(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:
        console.open_closed_streams()
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(args=words, **{**kwargs, "standalone_mode": False})
        except typer.TyperException as error:
            console.usage_fault(error, json_output="--json" in words)
            code = error.exit_code
        except typer.Abort:
            code = console.INTERRUPTED
        except SystemExit as error:
            if error.code != console.INTERRUPTED:
                raise
            code = console.INTERRUPTED
        if args is None and code == console.INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C must not break the interpreter's own end
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="agentrl",
    cls=ContractGroup,
    help="Train and run multi-agent LLM systems by published methods.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(name="recipes", help="The recipes that come with the package.", no_args_is_help=True)
models_app = typer.Typer(name="models", help="Models by name.", no_args_is_help=True)
data_app = typer.Typer(name="data", help="Data sets by name or file.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the name of a run.")]


def _leave(code: int | None) -> None:
    if code:
        raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        console.out(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("doctor", help="Is this machine fit to run? Exit 3 if something is broken.")
def doctor_command(
    json_output: JsonOption = False,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what can be repaired.")] = False,
    debug: DebugOption = False,
) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.doctor import doctor

        _leave(doctor(json_output, fix))


@app.command("check", help="Validate a recipe without loading weights.")
def check_command(
    recipe: RecipeArgument,
    smoke: SmokeOption = False,
    set_: SetOption = [],  # noqa: B006 - typer reads the default and never changes it
    json_output: JsonOption = False,
    show_sample: Annotated[bool, typer.Option("--show-sample", help="Show what agents see and is trained.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also ask the endpoints (10 s at most).")] = False,
    debug: DebugOption = False,
) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.check import check_recipe

        check_recipe(recipe, set_, smoke=smoke, show_sample=show_sample, deep=deep)


@recipes_app.command("list", help="Names, methods and titles.")
def recipes_list_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.recipes import recipes_list

        recipes_list(json_output)


@recipes_app.command("show", help="Print a recipe's YAML.")
def recipes_show_command(name: RecipeArgument, debug: DebugOption = False) -> None:
    with console.session(debug=debug):
        from agentrl.cli.recipes import recipes_show

        recipes_show(name)


@recipes_app.command("copy", help="Copy a recipe to a file or into a folder.")
def recipes_copy_command(
    name: RecipeArgument, dest: Annotated[Path, typer.Argument(metavar="DEST")], debug: DebugOption = False
) -> None:
    with console.session(debug=debug):
        from agentrl.cli.recipes import recipes_copy

        recipes_copy(name, dest)


@models_app.command("list", help="Names and their local folders.")
def models_list_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.models import models_list

        _leave(models_list(json_output))


@models_app.command("prepare", help="Make a model ready and print its folder.")
def models_prepare_command(name: NameArgument, json_output: JsonOption = False, debug: DebugOption = False) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.models import models_prepare

        _leave(models_prepare(name, json_output))


@data_app.command("list", help="Embedded data sets and public benchmarks.")
def data_list_command(json_output: JsonOption = False, debug: DebugOption = False) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.data import data_list

        _leave(data_list(json_output))


@data_app.command("prepare", help="Write an embedded set to files.")
def data_prepare_command(name: NameArgument, json_output: JsonOption = False, debug: DebugOption = False) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.data import data_prepare

        _leave(data_prepare(name, json_output))


@data_app.command("show", help="Columns, counts and a row of a set or a file.")
def data_show_command(name: NameArgument, json_output: JsonOption = False, debug: DebugOption = False) -> None:
    with console.session(json_output=json_output, debug=debug):
        from agentrl.cli.data import data_show

        _leave(data_show(name, json_output))


@app.command("inspect", help="Look into a run, or compare two.")
def inspect_command(
    run: RunArgument,
    run_b: Annotated[str | None, typer.Argument(metavar="[RUN_B]", help="A second run to compare with.")] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N")] = None,
    trajectory: Annotated[str | None, typer.Option("--trajectory", metavar="ID")] = None,
    agent: Annotated[str | None, typer.Option("--agent", metavar="A")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Every token with log-probs, advantage and mask.")] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a static report.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Write the curves.")] = None,
    run_dir: Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Where runs lie by name.")] = "runs",
    debug: DebugOption = False,
) -> None:
    with console.session(debug=debug):
        from agentrl.cli.inspect import inspect

        _leave(inspect(run, run_b, step, trajectory, agent, tokens, html, plot, run_dir))


@app.command("export", help="Write a checkpoint as a plain Hugging Face folder, or its links.")
def export_command(
    run: RunArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST")],
    step: Annotated[int | None, typer.Option("--step", metavar="N")] = None,
    policy: Annotated[str | None, typer.Option("--policy", metavar="P")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="The run's compute dtype if not set."),
    ] = None,
    official: Annotated[
        bool, typer.Option("--official", help="Links only: the released layout, a folder per agent and one of edges.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Adapters only: the whole model, with the adapter in its weights.")
    ] = False,
    run_dir: Annotated[str, typer.Option("--run-dir", metavar="DIR", help="Where runs lie by name.")] = "runs",
    debug: DebugOption = False,
) -> None:
    with console.session(debug=debug):
        from agentrl.cli.export import export

        export(run, step, policy, dest, run_dir, dtype, official, merge)


for group in (recipes_app, models_app, data_app, mars_app, mappa_app, recursivemas_app):
    app.add_typer(group)
