"""`agentrl export` of links: our files with their provenance, or the layout of the released ones.

Official: `DEST/AGENT/` per inner link and `DEST/outer/`, for the task family `recursivemas.official.task`. Read it back
with `recursivemas.official: {outer: DEST/outer, inner: {AGENT: DEST/AGENT, ...}}`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError
from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.link_folders import file_in, inner_name, outer_name
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.registry import load_recipe
from agentrl.run import read_manifest
from agentrl.update.link_files import (
    LinkSpec,
    StoredDtype,
    load_link,
    save_link,
    save_official_inner,
    save_official_outer,
)
from agentrl.update.link_header import read_metadata
from agentrl.update.links import InnerLink, Link, OuterLink

PROVENANCE = "provenance.json"
_FIGURES = ("eval_before", "eval_after", "rise", "held_out_loss_as_used")
_ABOUT = ("name", "seed", "command", "git_commit", "versions", "style", "stage", "form", "rounds", "latent_steps")


def export_links(run: Path, checkpoint: Path, dest: Path, dtype: StoredDtype, *, official: bool = False) -> Path:
    """Write the links of a checkpoint to `dest`, which must be new or empty, beside how they came about.

    Raises `ConfigError` for a folder that holds something, and for links that the official layout does not know. Only
    that layout asks the run's recipe, so links of a run whose keys are no longer known can be exported too.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ConfigError(f"DEST: {dest} holds something already", "name a new folder")
    config: RecursiveConfig | None = None
    if official:
        recipe = load_recipe(str(run / "config.yaml")).tree
        assert isinstance(recipe, RecursiveRecipe)
        config = recipe.recursivemas
        _refuse_unofficial(config)
    links = {path.stem: _read(path) for path in sorted((checkpoint / "links").glob("*.safetensors"))}
    temp = dest.with_name(f".{dest.name}.part")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        if config is not None:
            _write_official(config, links, temp, dtype)
        else:
            for name, (spec, link, training) in links.items():
                save_link(link, file_in(temp, name), spec, dtype, training)
        _write_provenance(run, checkpoint, temp, dtype, {name: one[2] for name, one in links.items()})
        if dest.exists():
            dest.rmdir()
        temp.rename(dest)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return dest


def _read(path: Path) -> tuple[LinkSpec, Link, Mapping[str, Any] | None]:
    found = read_metadata(path)
    try:
        spec = LinkSpec(**{field: found[field] for field in LinkSpec.__dataclass_fields__})
    except KeyError as error:
        raise DataError(f"{path}: its metadata has no {error}", "export from a run of agentrl") from None
    return spec, load_link(path, spec), found["training"]


def _refuse_unofficial(config: RecursiveConfig) -> None:
    if (config.inner_form, config.outer_form, config.match_norm) != ("ln_res", "ln_res", False):
        raise ConfigError("--official: released links have the form ln_res and no norm matching", "leave it out")
    keyless = [edge.name for edge in config.graph.edges if edge.key is None]
    if keyless:
        raise ConfigError(f"--official: edge {keyless[0]} has no key", "give each edge of the recipe its key")


def _write_official(config: RecursiveConfig, links: Mapping[str, Any], dest: Path, dtype: StoredDtype) -> None:
    task = "math" if config.official is None else config.official.task
    for agent in config.graph.agents:
        link = links[inner_name(agent)][1]
        assert isinstance(link, InnerLink)
        save_official_inner(dest / agent, {task: link}, dtype)
    edges = []
    for edge in config.graph.edges:
        link = links[outer_name(edge)][1]
        assert isinstance(link, OuterLink)
        edges.append((edge.key or "", f"{edge.source.title()}-{edge.target.title()}-Outerlink", link))
    save_official_outer(dest / "outer", {task: edges}, config.style, dtype)


def _write_provenance(
    run: Path, checkpoint: Path, dest: Path, dtype: StoredDtype, training: Mapping[str, Mapping[str, Any] | None]
) -> None:
    """How the links came about: the run's command, seed, commit and figures, without single items."""
    path = run / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    step = (read_manifest(checkpoint) or {}).get("step")
    figures = {key: _without_items(summary[key]) for key in _FIGURES if key in summary and summary.get("steps") == step}
    about = {key: summary[key] for key in _ABOUT if key in summary}
    text = json.dumps({**about, "steps": step, "stored": dtype, "links": training, **figures}, indent=2)
    (dest / PROVENANCE).write_text(text + "\n", "utf-8")


def _without_items(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "items"} if isinstance(value, Mapping) else value
