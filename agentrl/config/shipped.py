"""The recipes and trained links that come with the package, by path or by name.

In a source tree they lie in `recipes/` beside the package, in a wheel in `agentrl/shipped/`.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import agentrl
from agentrl.errors import ConfigError

_SUFFIXES = (".yaml", ".yml")


def shipped_folder() -> Path:
    """Where the shipped recipes lie; the folder may be absent in a broken install."""
    package = Path(agentrl.__file__).resolve().parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Name -> file, sorted; the name is the path below the folder without its suffix, such as `smoke/mars`."""
    folder = shipped_folder()
    files = sorted(folder.rglob("*.yaml")) if folder.is_dir() else []
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def shipped_links() -> dict[str, Path]:
    """Name -> folder of trained links (`*.safetensors`, and `provenance.json` that says how they were made)."""
    folder = shipped_folder() / "links"
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()} if folder.is_dir() else {}


def shipped_name(text: str) -> str:
    """The shipped name that a user may mean: `recipes/hle.yaml`, `hle.yaml` and `hle` are all `hle`."""
    name = text.replace("\\", "/").removeprefix("./")
    name = name.removeprefix("recipes/")
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def resolve_recipe(text: str) -> Path:
    """The file behind a path or a shipped name; a path wins. Raises `ConfigError` naming the nearest shipped one."""
    path = Path(text)
    try:
        path = path.expanduser()
        if path.is_file():
            return path
        found = path.exists()
    except (OSError, ValueError, RuntimeError):
        # A name too long for the file system, one with a NUL, or the home of nobody, is no path, and no name either.
        found = False
    shipped = shipped_recipes()
    name = shipped_name(text)
    if name in shipped:
        return shipped[name]
    if found:
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise ConfigError(f"{text}: {kind}, expected a recipe file", "name a .yaml file or a shipped recipe")
    near = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5) or difflib.get_close_matches(
        name.rsplit("/", 1)[-1], shipped, n=1, cutoff=0.6
    )
    hint = f"did you mean {near[0]}?" if near else "`agentrl recipes list` names the shipped ones"
    raise ConfigError(f"{text}: no such file, and no shipped recipe of that name", hint)
