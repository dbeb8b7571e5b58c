"""Where links lie and what their files are called; no torch, so that `check` may ask."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.shipped import shipped_links
from agentrl.errors import ConfigError, MissingError
from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.run import latest_checkpoint
from agentrl.update.link_header import read_metadata


def inner_name(agent: str) -> str:
    return f"inner-{agent}"


def outer_name(edge: Edge) -> str:
    return f"outer-{edge.name}"


def used_names(config: RecursiveConfig) -> tuple[str, ...]:
    """The links that the recipe's rounds go through."""
    agents, edges = config.graph.used(config.rounds)
    return (*map(inner_name, agents), *map(outer_name, edges))


def file_in(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def links_folder(name: str, runs: str) -> Path:
    """A folder of links, the newest whole checkpoint of a run (RUN, RUN@step), or links that come with the package."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "checkpoints").is_dir():
        return path
    base, _, step = name.rpartition("@")
    named: list[tuple[str, int | None]] = [(name, None)]  # a run that is literally called RUN@step comes first
    if base and step.isdecimal():
        named.append((base, int(step)))
    for candidate, number in ((place / run, at) for run, at in named for place in (Path(), Path(runs))):
        candidate = candidate.expanduser()
        if (candidate / "checkpoints").is_dir():
            found = latest_checkpoint(candidate, number)
            if found is not None and (found / "links").is_dir():
                return found / "links"
            wanted = "checkpoint" if number is None else f"checkpoint of step {number}"
            raise MissingError(f"{candidate} has no whole {wanted} with links", "name another step, or train first")
    shipped = shipped_links()
    if name in shipped:
        return shipped[name]
    come = f", or what the package comes with: {', '.join(shipped)}" if shipped else ""
    raise MissingError(
        f"recursivemas.links: there is no folder or run {name!r} with links",
        f"name a folder of link files, a run{come}",
    )


def refuse_untrained(recipe: RecursiveRecipe) -> None:
    """Before a run folder is made or a model loads: raises `ConfigError` where links that the rounds use are random and
    not allowed to be, and `MissingError` where they are not there."""
    config = recipe.recursivemas
    if config.links is not None:
        folder = links_folder(config.links, recipe.run.dir)
        random = [n for n in used_names(config) if read_metadata(file_in(folder, n))["training"] is None]
        if random and not config.allow_untrained:
            raise refused_untrained(f"{config.links}: {', '.join(random)} hold random weights")
    elif config.official is None and not config.allow_untrained:
        raise refused_untrained("no trained links are named")


def refused_untrained(why: str) -> ConfigError:
    return ConfigError(
        f"recursivemas.links: {why}, and untrained links carry nothing",
        "name a folder or a run with trained links (--links), or give --allow-untrained",
    )


def link_name(model: str) -> str:
    """How link files call a model: by its name, or by the last part of its folder, which may lie elsewhere tomorrow."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
