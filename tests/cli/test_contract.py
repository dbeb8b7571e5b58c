"""The command line has every command and flag that scripts rely on; names copied from its contract."""

from __future__ import annotations

import pytest
import typer

from agentrl.cli import app

TALK = "--json --debug"
COMMON = "--set --smoke --run-dir --name --seed --quiet --json --debug"
COMMANDS = {
    "": "--version",
    "doctor": f"--fix {TALK}",
    "check": f"RECIPE --smoke --set --show-sample --deep {TALK}",
    "recipes list": TALK,
    "recipes show": "RECIPE --debug",
    "recipes copy": "RECIPE DEST --debug",
    "models list": TALK,
    "models prepare": f"NAME {TALK}",
    "data list": TALK,
    "data prepare": f"NAME {TALK}",
    "data show": f"NAME {TALK}",
    "inspect": "RUN [RUN_B] --step --trajectory --agent --tokens --html --plot --run-dir --debug",
    "export": "RUN DEST --step --policy --dtype --official --merge --run-dir --debug",
    "mars train": f"RECIPE {COMMON} --resume --steps --from-rollouts",
    "mars eval": f"RECIPE {COMMON} --checkpoint",
    "mars infer": f"RECIPE {COMMON} --checkpoint --question --input",
    "mars rollout": f"RECIPE {COMMON} --checkpoint",
    "mappa train": f"RECIPE {COMMON} --resume --steps --from-rollouts",
    "mappa eval": f"RECIPE {COMMON} --checkpoint",
    "mappa infer": f"RECIPE {COMMON} --checkpoint --question --input",
    "mappa rollout": f"RECIPE {COMMON} --checkpoint",
    "mappa coach-eval": f"[RECIPE] {COMMON} --coach --all --split --repeats",
    "recursivemas train": f"RECIPE {COMMON} --resume --steps --from-rollouts --links --rounds --latent-steps",
    "recursivemas eval": (f"RECIPE {COMMON} --checkpoint --links --rounds --latent-steps --controls --allow-untrained"),
    "recursivemas infer": (
        f"[RECIPE] {COMMON} --checkpoint --question --input --links --rounds --latent-steps --allow-untrained"
    ),
    "recursivemas sweep": "RECIPE --set --smoke --run-dir --name --quiet --json --debug --resume --steps",
}


OF_THE_SHELL = {"--install-completion", "--show-completion"}


def command_of(words):
    command = typer.main.get_command(app)
    for word in words.split():
        command = command.commands[word]
    return command


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_takes_what_the_contract_names(words):
    command = command_of(words)
    taken = {name for parameter in command.params for name in (*parameter.opts, parameter.metavar or "")}
    assert not set(COMMANDS[words].split()) - taken, taken


@pytest.mark.parametrize("words", COMMANDS)
def test_every_flag_is_named_in_the_contract(words):
    flags = {flag for parameter in command_of(words).params for flag in parameter.opts if flag.startswith("--")}
    assert flags - OF_THE_SHELL <= set(COMMANDS[words].split())


def test_every_option_of_a_method_is_written_once():
    """Two commands that take an option of one name take the very same one."""
    seen: dict[str, tuple] = {}
    for method in ("mars", "mappa", "recursivemas"):
        for command in typer.main.get_command(app).commands[method].commands.values():
            for option in command.params:
                if option.param_type_name == "option":
                    form = (option.opts, option.help, option.metavar, option.default)
                    assert seen.setdefault(option.name, form) == form
    assert {"links", "set_", "checkpoint", "split"} <= set(seen)
