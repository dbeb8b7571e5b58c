"""What `check` says about a RecursiveMAS recipe beyond its schema: links of others, prompts that no window holds.

No torch: link files tell whose they are in their first bytes, prompts are counted by the models' tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.errors import AgentRLError, MissingError
from agentrl.models import find
from agentrl.preflight.check import missing_callable
from agentrl.recipes.recursivemas.link_folders import (
    file_in,
    inner_name,
    link_name,
    links_folder,
    outer_name,
    used_names,
)
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.recipes.recursivemas.recipe import GRADERS, RecursiveRecipe
from agentrl.types import Task
from agentrl.update.link_header import read_metadata

Remark = tuple[str, str, str]


def findings(recipe: RecursiveRecipe) -> Iterator[Remark]:
    """(level, key, "cause; fix") of every remark. A model that is not on this machine is not looked into."""
    known = (*dict.fromkeys(GRADERS.values()), "f1")
    if recipe.reward is not None and recipe.reward not in known and (why := missing_callable(recipe.reward)):
        cause = f"{recipe.reward!r} is neither {', '.join(known)} nor a function: {why}"
        yield "error", "reward", f"{cause}; name one of them, or module:function (the current folder is searched too)"
    decoder = recipe.recursivemas.graph.decoder
    if recipe.recursivemas.style == "deliberation" and not recipe.decoder.tools:
        cause = "none, but the prompts of this style offer Python and search"
        yield "warning", f"agents.{decoder}.tools", f"{cause}; name python and search, and set up tools.search.corpus"
    configs = _model_configs(recipe)
    yield from _links(recipe, configs)
    yield from _windows(recipe, configs)


def _model_configs(recipe: RecursiveRecipe) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Policy -> folder and text config, of the models that are here and whole."""
    found = {}
    for policy, model in recipe.policy_models.items():
        try:
            folder = find(model.name)
            config = json.loads((folder / "config.json").read_text("utf-8")) if folder else None
        except (AgentRLError, OSError, ValueError):
            continue  # told of elsewhere
        if folder is not None and isinstance(config, dict):
            found[policy] = folder, config.get("text_config") or config
    return found


def _links(recipe: RecursiveRecipe, configs: dict[str, tuple[Path, dict[str, Any]]]) -> Iterator[Remark]:
    config, key = recipe.recursivemas, "recursivemas.links"
    if config.official is not None:
        folders = {"outer": config.official.outer, **{f"inner.{a}": f for a, f in config.official.inner.items()}}
        for place, named in folders.items():
            if not Path(named).expanduser().is_dir():
                yield (
                    "missing",
                    "recursivemas.official." + place,
                    f"there is no folder {named!r}; save the released files there",
                )
        return
    if config.links is None:
        if not config.allow_untrained:
            hint = "name some with --links to answer questions, or give --allow-untrained"
            yield "info", key, f"none are named, so training begins with new ones; {hint}"
        return
    try:
        folder = links_folder(config.links, recipe.run.dir)
        wanted = _wanted(recipe, configs)
        told = {name: read_metadata(file_in(folder, name)) for name in wanted}
    except AgentRLError as error:
        level = "missing" if isinstance(error, MissingError) else "error"
        yield level, key, f"{error.cause.removeprefix(f'{key}: ')}; {error.fix}"
        return
    for name, values in wanted.items():
        for what, value in values.items():
            if value is not None and told[name].get(what) != value:
                cause = f"{file_in(folder, name)} was made with {what} {told[name].get(what)!r}, here it is {value!r}"
                yield "error", key, f"{cause}; name the links of these models and forms, or train them"
                return
    random = [name for name in used_names(config) if told[name]["training"] is None]
    if random and not config.allow_untrained:
        text = f"{', '.join(random)} hold random weights; train them, or give --allow-untrained to answer with them"
        yield "info", key, text


def _wanted(recipe: RecursiveRecipe, configs: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Link name -> what its file must say; None where it is not known."""
    config, models, dims = recipe.recursivemas, {}, {}
    for name in config.graph.agents:
        policy = recipe.agents[name].policy
        models[name] = link_name(recipe.policy_models[policy].name)
        own = configs[policy][1] if policy in configs else {}
        dims[name] = own.get("hidden_size") or own.get("n_embd")
    ends = {inner_name(a): ("inner", a, a, config.inner_form) for a in config.graph.agents}
    ends |= {outer_name(e): ("outer", e.source, e.target, config.outer_form) for e in config.graph.edges}
    return {
        name: {
            "kind": kind,
            "form": form,
            "source": models[source],
            "target": models[target],
            "dim_in": dims[source],
            "dim_out": dims[target],
        }
        for name, (kind, source, target, form) in ends.items()
    }


def _windows(recipe: RecursiveRecipe, configs: dict[str, tuple[Path, dict[str, Any]]]) -> Iterator[Remark]:
    """Prompts without a question, and their latents, must fit each agent's window."""
    config, formats = recipe.recursivemas, dict[Path, ChatFormat]()
    for name in config.graph.agents:
        policy = recipe.agents[name].policy
        if policy not in configs:
            continue
        folder, model = configs[policy]
        window = model.get("max_position_embeddings") or model.get("n_positions")
        try:
            if folder not in formats:
                formats[folder] = ChatFormat.from_folder(folder)
            chat = Chat(formats[folder], enable_thinking=config.enable_thinking)
            for number in (1, 2)[: config.rounds]:
                text = config.prompt_of(name, number)
                task = Task("check", "", info=_Blank())
                runs = ids_around_slots(chat, config.system_of(name), text, task, config.instruction)
                length = sum(map(len, runs)) + (len(runs) - 1) * config.latent_steps
                needed = length + max(config.latent_steps - 1, int(name == config.graph.decoder))
                if window and needed > window:
                    cause = (
                        f"{config.latent_steps} steps need {needed} positions of agent {name} in round {number} before "
                        f"any question, the window of {recipe.policy_models[policy].name} is {window}"
                    )
                    yield "error", "recursivemas.latent_steps", f"{cause}; lower it"
                    return
        except AgentRLError as error:
            yield "error", f"agents.{name}", f"{error.cause}; {error.fix}"
            return


class _Blank(dict[str, str]):
    """Every field is there, and empty."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> str:
        return ""
