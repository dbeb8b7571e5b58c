"""Which links a system needs, and where they lie.

Our folder holds `inner-AGENT.safetensors` and `outer-SOURCE-TARGET.safetensors`; each file names its models, form and
norm matching, so links of another system are refused. Official folders are read by their own configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import DataError, MissingError
from agentrl.recipes.recursivemas.config import OfficialLinks, RecursiveConfig
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.recipes.recursivemas.link_folders import (
    file_in,
    inner_name,
    links_folder,
    outer_name,
    refused_untrained,
    used_names,
)
from agentrl.rollout.latent_backbone import Backbone
from agentrl.update.link_files import (
    LinkSpec,
    StoredDtype,
    load_link,
    official_inner_file,
    official_outer_files,
    save_link,
)
from agentrl.update.link_header import read_metadata
from agentrl.update.links import InnerLink, Link, OuterLink, mean_token_norm


@dataclass(frozen=True, slots=True)
class Links:
    """Inner links by agent, outer links by edge, and what each is.

    `training` says how each link was trained last, and under `before` how until then, by its name (`inner_name`,
    `outer_name`): None for random weights. `used` are the names of those that the recipe's rounds go through.
    """

    inner: Mapping[str, InnerLink]
    outer: Mapping[Edge, OuterLink]
    inner_specs: Mapping[str, LinkSpec]
    outer_specs: Mapping[Edge, LinkSpec]
    training: Mapping[str, Mapping[str, Any] | None]
    used: tuple[str, ...]

    @property
    def untrained(self) -> tuple[str, ...]:
        return tuple(name for name, how in self.training.items() if how is None)

    @property
    def trained(self) -> bool:
        """Whether every link that is used is."""
        return not set(self.untrained) & set(self.used)

    @property
    def by_name(self) -> dict[str, Link]:
        return {
            **{inner_name(agent): link for agent, link in self.inner.items()},
            **{outer_name(edge): link for edge, link in self.outer.items()},
        }

    @property
    def num_parameters(self) -> int:
        return sum(self.parameter_counts.values())

    @property
    def parameter_counts(self) -> dict[str, int]:
        """Per link, by name."""
        return {name: sum(p.numel() for p in link.parameters()) for name, link in self.by_name.items()}

    def after(self, names: Iterable[str], how: Mapping[str, Any]) -> Links:
        """The same links, of which those named were trained so."""
        return replace(self, training={**self.training, **dict.fromkeys(names, how)})


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
        built = {a: s.build() for a, s in inner.items()}, {e: s.build() for e, s in outer.items()}
    names = (*map(inner_name, inner), *map(outer_name, outer))
    return _links(*built, inner, outer, dict.fromkeys(names), used_names(config))


def open_links(
    config: RecursiveConfig, backbones: Mapping[str, Backbone], *, seed: int, runs: str, allow_untrained: bool = False
) -> Links:
    """The links that the recipe names; new ones where it names none.

    Raises `ConfigError` for untrained ones where neither the recipe nor the caller allows them, `MissingError` for
    files that are not there, and `DataError` for links of other models.
    """
    allowed = allow_untrained or config.allow_untrained
    if config.links is None and config.official is None:
        if not allowed:
            raise refused_untrained("no trained links are named")
        return new_links(config, backbones, seed)
    inner, outer = specs_for(config, backbones)
    training: dict[str, Mapping[str, Any] | None]
    if config.official is not None:
        inner_files, outer_files = _official_files(config.official, outer)
        how = {"official": config.official.task}
        training = dict.fromkeys((*map(inner_name, inner), *map(outer_name, outer)), how)
    else:
        folder = links_folder(config.links or "", runs)
        inner_files = {agent: file_in(folder, inner_name(agent)) for agent in inner}
        outer_files = {edge: file_in(folder, outer_name(edge)) for edge in outer}
        training = {p.stem: read_metadata(p)["training"] for p in (*inner_files.values(), *outer_files.values())}
    links = _links(
        {agent: load_link(inner_files[agent], spec) for agent, spec in inner.items()},
        {edge: load_link(outer_files[edge], spec) for edge, spec in outer.items()},
        inner,
        outer,
        training,
        used_names(config),
    )
    if not links.trained and not allowed:
        random = ", ".join(name for name in links.untrained if name in links.used)
        raise refused_untrained(f"{config.links}: {random} hold random weights")
    return links


def save_links(links: Links, folder: Path, dtype: StoredDtype = "float32") -> None:
    """Write every link into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = {inner_name(a): spec for a, spec in links.inner_specs.items()}
    specs |= {outer_name(e): spec for e, spec in links.outer_specs.items()}
    for name, link in links.by_name.items():
        save_link(link, file_in(folder, name), specs[name], dtype, links.training[name])


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
    training: Mapping[str, Mapping[str, Any] | None],
    used: tuple[str, ...],
) -> Links:
    return Links(
        {a: link for a, link in inner.items() if isinstance(link, InnerLink)},
        {e: link for e, link in outer.items() if isinstance(link, OuterLink)},
        inner_specs,
        outer_specs,
        training,
        used,
    )
