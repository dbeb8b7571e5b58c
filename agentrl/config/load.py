"""From a recipe's file and the command line to one validated tree.

Precedence: defaults, YAML, `--smoke`, `--set`. A recipe's section `smoke` holds what `--smoke` changes in it beyond the
method's own cut; it counts only then, and is validated always. Validation is strict, on the merged tree; every fault
names file and line, the dotted key, the given value, what was expected and the fix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from agentrl.config.draft import Draft, SmokeLeaf
from agentrl.config.problems import Mark, Problem, RecipeError
from agentrl.config.schema import BaseRecipe
from agentrl.config.shipped import resolve_recipe
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A validated recipe. `origins` tells for each leaf of the tree, by its dotted key, where its value came from:
    `default`, `file:line`, `smoke` or `--set`."""

    tree: BaseRecipe
    origins: dict[str, str]
    source: Path


def load(
    path_or_name: str,
    schema_for_method: Callable[[str], type[BaseRecipe]],
    overrides: Sequence[str] = (),
    smoke: bool = False,
) -> Loaded:
    """Load a recipe by path or shipped name and validate it against its method's schema.

    `schema_for_method` maps the value of `method:` to the schema and raises `ConfigError` for an unknown one.
    `overrides` are `key.path=value` texts, the values YAML. Raises `ConfigError`: a `RecipeError` lists every fault.
    """
    source = resolve_recipe(path_or_name)
    label = _label(source)
    draft = Draft.read(source, label)
    schema = draft.schema(schema_for_method)
    own = draft.take_smoke()
    if (smoke or own) and schema.smoke.__func__ is BaseRecipe.smoke.__func__:  # type: ignore[attr-defined]  # a bound classmethod
        given = "--smoke" if smoke else "the section smoke"
        raise ConfigError(f"{label}: method {draft.values['method']} has no smoke form", f"leave out {given}")
    faults = _smoke_faults(draft, own, schema)
    if not smoke:
        faults = _told_without_smoke(faults, own)
    try:
        if smoke:
            draft.cut_down(own, schema)
        draft.apply(overrides, schema)
        tree = draft.validate(schema)
    except RecipeError as error:
        raise RecipeError(dict.fromkeys([*error.problems, *faults])) from error
    if faults:
        raise RecipeError(faults)
    return Loaded(tree, draft.origins(tree), source)


def dump_yaml(tree: BaseRecipe) -> str:
    """The resolved tree as YAML that `load` reads back to the same tree; `method:` is its first key."""
    return str(yaml.safe_dump(tree.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _label(source: Path) -> str:
    """The file as messages name it: relative where it lies below the current folder."""
    relative = os.path.relpath(source)
    return str(source) if relative.startswith("..") else relative


def _smoke_faults(draft: Draft, own: Sequence[SmokeLeaf], schema: type[BaseRecipe]) -> list[Problem]:
    """What a recipe's own smoke section breaks in its smoke form: the faults that are not there without the section.

    The rest of the recipe may want a `--set` that is not known here, so its own faults are not these.
    """
    if not own or not (found := _refused(draft, own, schema)):
        return []
    without = set(_refused(draft, (), schema))
    return [problem for problem in found if problem not in without]


def _refused(draft: Draft, own: Sequence[SmokeLeaf], schema: type[BaseRecipe]) -> tuple[Problem, ...]:
    form = draft.copy()
    try:
        form.cut_down(own, schema)
        form.validate(schema)
    except RecipeError as error:
        return error.problems
    return ()


def _told_without_smoke(faults: Sequence[Problem], own: Sequence[SmokeLeaf]) -> list[Problem]:
    """A fault that the section causes at a key outside of it is told at the section, since that key is right alone."""
    inside = {mark for leaf in own for mark in leaf.marks.values()}
    return [
        fault
        if fault.mark in inside
        else Problem(min(inside, key=_line), "smoke", f"with it, {fault.cause}", fault.fix)
        for fault in faults
    ]


def _line(mark: Mark) -> int:
    return mark.line or 0
