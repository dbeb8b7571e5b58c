"""`agentrl check`: the whole recipe validated, no weights loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from agentrl.cli import console
from agentrl.cli.method import loaded_rows, search_current_folder

if TYPE_CHECKING:
    from agentrl.config.load import Loaded
    from agentrl.preflight.check import Finding


def check_recipe(recipe: str, overrides: Sequence[str], *, smoke: bool, show_sample: bool, deep: bool) -> None:
    """Print what a recipe resolves to and every finding.

    Raises `ConfigError` for a recipe that is none, and `PreflightError` for one that cannot run here.
    """
    from agentrl.preflight.check import check, refuse_errors
    from agentrl.recipes.registry import load_recipe

    search_current_folder()
    loaded = load_recipe(recipe, overrides, smoke)
    findings = check(loaded, deep=deep)
    errors = [finding for finding in findings if finding.level == "error"]
    if console.mode().json_output:
        console.json(_as_json(loaded, findings))
    else:
        console.table(("key", "value", "from"), loaded_rows(loaded), title=f"{loaded.source}: all but defaults")
        for finding in findings:
            if finding.level != "error":
                console.out(
                    f"{finding.level}: {finding.cause}" + (f" ({finding.fix})" if finding.level != "info" else "")
                )
    refuse_errors(findings)
    if show_sample:
        _show_sample(loaded)
    if not console.mode().json_output:
        console.out(f"ok: {loaded.source} ({loaded.tree.method}, {len(findings) - len(errors)} remarks)")


def _as_json(loaded: Loaded, findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "ok": not any(finding.level == "error" for finding in findings),
        "source": str(loaded.source),
        "recipe": loaded.tree.model_dump(mode="json"),
        "origins": loaded.origins,
        "findings": [asdict(finding) for finding in findings],
    }


def _show_sample(loaded: Loaded) -> None:
    """The contexts of one scripted rollout: trained text in green, the rest dimmed behind its mask's reason."""
    from agentrl.recipes.registry import VerbOptions, verb

    previews = verb(loaded.tree.method, "preview")(loaded.tree, VerbOptions(origins=loaded.origins))
    for preview in previews["samples"]:
        console.out(f"--- {preview.title}")
        for text, reason in preview.parts:
            label = "trained" if reason is None else reason.value
            console.styled([(f"[{label}] ", "bold"), (text, "green" if reason is None else "dim")])
