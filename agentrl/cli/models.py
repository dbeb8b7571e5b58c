"""`agentrl models`: which models have a name here, and making them ready."""

from __future__ import annotations

from agentrl.cli import console


def models_list(json_output: bool = False) -> int:
    """Print every embedded and tiny model, with its folder where it is made. Returns the exit code."""
    from agentrl.models import known_models

    models = known_models()
    if json_output:
        console.json(
            [{"name": m.name, "kind": m.kind, "folder": m.folder and str(m.folder), "note": m.note} for m in models]
        )
        return 0
    rows = [(m.name, m.kind, str(m.folder) if m.folder else "(made on first use)", m.note) for m in models]
    console.table(("name", "kind", "folder", "note"), rows, title="models (a folder or a cached hub id works too)")
    return 0


def models_prepare(name: str, json_output: bool = False) -> int:
    """Make a model ready and print its folder. Raises `MissingError` where it cannot be had."""
    from agentrl.models import prepare

    folder = prepare(name)
    if json_output:
        console.json({"name": name, "folder": str(folder)})
    else:
        console.out(f"{name}: {folder}")
    return 0
