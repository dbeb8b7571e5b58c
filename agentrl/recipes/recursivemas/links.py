"""Which links a system needs, and where they lie.

Our folder holds `inner-AGENT.safetensors` and `outer-SOURCE-TARGET.safetensors`; each file names its models, form and
norm matching, so links of another system are refused. Official folders are read by their own configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.errors import ConfigError, DataError, MissingError
from agentrl.recipes.recursivemas.config import OfficialLinks, RecursiveConfig
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.rollout.latent import Backbone
from agentrl.run import latest_checkpoint
from agentrl.update.link_files import (
    LinkSpec,
    StoredDtype,
    load_link,
    official_inner_file,
    official_outer_files,
    save_link,
)
from agentrl.update.links import InnerLink, Link, OuterLink, mean_token_norm


@dataclass(frozen=True, slots=True)
class Links:
    """Inner links by agent, outer links by edge, and what each is. `trained` is False for random weights."""

    inner: Mapping[str, InnerLink]
    outer: Mapping[Edge, OuterLink]
    inner_specs: Mapping[str, LinkSpec]
    outer_specs: Mapping[Edge, LinkSpec]
    trained: bool

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for link in (*self.inner.values(), *self.outer.values()) for p in link.parameters())


def specs_for(
    config: RecursiveConfig, backbones: Mapping[str, Backbone]
) -> tuple[dict[str, LinkSpec], dict[Edge, LinkSpec]]:
    """What every link of the system must be; `backbones` by agent."""
    norms: dict[str, float | None] = {}
    for backbone in backbones.values():
        if backbone.name not in norms:
            norms[backbone.name] = round(mean_token_norm(backbone.embeddings), 6) if config.match_norm else None
    inner = {
        agent: LinkSpec.inner(b.name, b.dim, form=config.inner_form, target_norm=norms[b.name])
        for agent, b in backbones.items()
    }
    outer = {}
    for edge in config.graph.edges:
        source, target = backbones[edge.source], backbones[edge.target]
        outer[edge] = LinkSpec.outer(
            source.name,
            target.name,
            source.dim,
            target.dim,
            form=config.outer_form,
            target_norm=norms[target.name],
        )
    return inner, outer


def new_links(config: RecursiveConfig, backbones: Mapping[str, Backbone], seed: int) -> Links:
    """Links of random weights, the same for the same seed; torch's global generator is left as it was."""
    inner, outer = specs_for(config, backbones)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _links(
            {a: s.build() for a, s in inner.items()}, {e: s.build() for e, s in outer.items()}, inner, outer, False
        )


def open_links(config: RecursiveConfig, backbones: Mapping[str, Backbone], *, seed: int, runs: str) -> Links:
    """The links that the recipe names.

    Raises `ConfigError` where it names none and `allow_untrained` is off, `MissingError` for files that are not there,
    and `DataError` for links of other models.
    """
    if config.links is None and config.official is None:
        if not config.allow_untrained:
            raise ConfigError(
                "recursivemas.links: no trained links are named, and untrained ones carry nothing",
                "name a folder or a run with links, or set recursivemas.allow_untrained=true",
            )
        return new_links(config, backbones, seed)
    inner, outer = specs_for(config, backbones)
    if config.official is not None:
        inner_files, outer_files = _official_files(config.official, outer)
    else:
        folder = links_folder(config.links or "", runs)
        inner_files = {agent: folder / f"inner-{agent}.safetensors" for agent in inner}
        outer_files = {edge: folder / f"outer-{edge.name}.safetensors" for edge in outer}
    return _links(
        {agent: load_link(inner_files[agent], spec) for agent, spec in inner.items()},
        {edge: load_link(outer_files[edge], spec) for edge, spec in outer.items()},
        inner,
        outer,
        True,
    )


def save_links(links: Links, folder: Path, dtype: StoredDtype = "float32") -> None:
    """Write every link into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for agent, link in links.inner.items():
        save_link(link, folder / f"inner-{agent}.safetensors", links.inner_specs[agent], dtype)
    for edge, outer in links.outer.items():
        save_link(outer, folder / f"outer-{edge.name}.safetensors", links.outer_specs[edge], dtype)


def links_folder(name: str, runs: str) -> Path:
    """A folder of links, or the newest whole checkpoint of a run (RUN, RUN@step)."""
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
    raise MissingError(f"there is no folder or run {name!r} with links", "name a folder of link files, or a run")


def _official_files(
    official: OfficialLinks, outer: Mapping[Edge, LinkSpec]
) -> tuple[dict[str, Path], dict[Edge, Path]]:
    inner = {a: official_inner_file(Path(f).expanduser(), official.task) for a, f in official.inner.items()}
    folder = Path(official.outer).expanduser()
    listed = official_outer_files(folder, official.task)
    files = {}
    for edge, spec in outer.items():
        entry = listed.get(edge.key or "")
        if entry is None:
            raise MissingError(f"{folder} has no link {edge.key!r} for edge {edge.name}", f"it has {sorted(listed)}")
        if (entry.dim_in, entry.dim_out) != (spec.dim_in, spec.dim_out):
            raise DataError(
                f"{folder}: link {edge.key!r} maps {entry.dim_in} to {entry.dim_out}; {spec.title} is needed",
                "name the links of these models, or the models of these links",
            )
        files[edge] = entry.path
    return inner, files


def _links(
    inner: Mapping[str, Link],
    outer: Mapping[Edge, Link],
    inner_specs: Mapping[str, LinkSpec],
    outer_specs: Mapping[Edge, LinkSpec],
    trained: bool,
) -> Links:
    return Links(
        {a: link for a, link in inner.items() if isinstance(link, InnerLink)},
        {e: link for e, link in outer.items() if isinstance(link, OuterLink)},
        inner_specs,
        outer_specs,
        trained,
    )
