"""`agentrl recipes`: the recipes that come with the package."""

from __future__ import annotations

from itertools import dropwhile, takewhile
from pathlib import Path

from agentrl.cli import console


def recipes_list(json_output: bool = False) -> None:
    """Print each shipped recipe with its method and the first sentence of its comment."""
    from agentrl.config.shipped import shipped_recipes

    rows = [(name, *_method_and_title(path)) for name, path in shipped_recipes().items()]
    if json_output:
        console.json([{"name": name, "method": method, "title": title} for name, method, title in rows])
    else:
        console.table(("name", "method", "title"), rows, title="shipped recipes")


def _method_and_title(path: Path) -> tuple[str, str]:
    """The first sentence of a recipe's first comment, however its lines are broken."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    methods = [line.removeprefix("method:").split("#")[0].strip() for line in lines if line.startswith("method:")]
    first, _, _ = " ".join(takewhile(bool, dropwhile(lambda line: not line, comments))).partition(". ")
    return (methods or ["?"])[0], first.rstrip(".")


def recipes_show(name: str) -> None:
    """Print a recipe's file. Raises `ConfigError` for an unknown name."""
    from agentrl.config.shipped import resolve_recipe
    from agentrl.config.source import read_text

    path = resolve_recipe(name)
    console.out(read_text(path, name).rstrip("\n"))


def recipes_copy(name: str, dest: Path) -> None:
    """Copy a recipe to a file, or into a folder; a file that is there is never replaced. Raises `ConfigError`."""
    from agentrl.config.shipped import resolve_recipe
    from agentrl.config.source import read_text
    from agentrl.errors import ConfigError

    source = resolve_recipe(name)
    target = dest / source.name if dest.is_dir() else dest
    text = read_text(source, name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{target} is there already", "name another file, or remove that one") from error
    except OSError as error:
        raise ConfigError(f"cannot write {target} ({error.strerror})", "name a place that you may write to") from error
    console.out(f"{target}")
