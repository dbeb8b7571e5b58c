"""From a recipe's file and the command line to one validated tree.

Precedence: defaults, YAML, `--smoke`, `--set`. A recipe's section `smoke` holds what `--smoke` changes in it beyond the
method's own cut, and counts only then. Validation runs once, strictly, on the merged tree; every fault names
file and line, the dotted key, the given value, what was expected and the fix.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.explain import (
    accepts_null,
    annotations_at,
    expectation,
    is_section,
    keys_of,
    models_in,
    unknown_key_fix,
    wrong_value_fix,
)
from agentrl.config.problems import Mark, Problem, RecipeError, is_secret, shown
from agentrl.config.schema import BaseRecipe
from agentrl.config.shipped import resolve_recipe
from agentrl.config.source import KeyPath, dotted, parse, read_text
from agentrl.errors import ConfigError

SMOKE = Mark("smoke", rank=1)
_SET_RANK = 2
_KEY = re.compile(r"^[^\s.=]+(\.[^\s.=]+)*$")
_SECRET_FIX = "keep the secret in an environment variable, and name that variable instead"


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
    draft = _Draft.read(source, label)
    schema = draft.schema(schema_for_method)
    own = draft.take_smoke()
    if smoke:
        if schema.smoke.__func__ is BaseRecipe.smoke.__func__:  # type: ignore[attr-defined]  # a bound classmethod
            raise ConfigError(f"{label}: method {draft.values['method']} has no smoke form", "leave out --smoke")
        for key, value in schema.smoke_of(draft.values).items():
            draft.merge(tuple(key.split(".")), value, SMOKE, schema)
        for path, value, mark in own:
            draft.merge(path, value, mark, schema)
    draft.apply(overrides, schema)
    tree = draft.validate(schema)
    return Loaded(tree, draft.origins(tree), source)


def dump_yaml(tree: BaseRecipe) -> str:
    """The resolved tree as YAML that `load` reads back to the same tree; `method:` is its first key."""
    return str(yaml.safe_dump(tree.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def _label(source: Path) -> str:
    """The file as messages name it: relative where it lies below the current folder."""
    relative = os.path.relpath(source)
    return str(source) if relative.startswith("..") else relative


class _Draft:
    """The merged values before validation, and the mark of every key."""

    def __init__(self, values: dict[str, Any], marks: dict[KeyPath, Mark], label: str) -> None:
        self.values = values
        self.marks = marks
        self.label = label
        self.dropped: dict[KeyPath, Mark] = {}

    @classmethod
    def read(cls, source: Path, label: str) -> _Draft:
        top = Mark(label)
        values, lines = parse(read_text(source, label), top)
        fix = "begin with `method: NAME`, then the sections; `agentrl recipes show NAME` prints an example"
        if values is None:
            raise RecipeError([Problem(top, "", "the file is empty", fix)])
        if not isinstance(values, dict):
            kind = "a list" if isinstance(values, list) else f"the single value {shown(values)}"
            raise RecipeError([Problem(Mark(label, 1), "", f"{kind}, expected a mapping of sections", fix)])
        if not values:
            raise RecipeError([Problem(Mark(label, 1), "", "the file holds no keys", fix)])
        first = next(iter(values))
        if first != "method":
            place = f"it stands on line {lines[('method',)]}" if "method" in values else "it is missing"
            message = f"the first key is {shown(first)}, expected method ({place})"
            raise RecipeError(
                [Problem(Mark(label, lines[(first,)]), "method", message, "make `method:` the first key")]
            )
        return cls(values, {path: Mark(label, line) for path, line in lines.items()}, label)

    def schema(self, schema_for_method: Callable[[str], type[BaseRecipe]]) -> type[BaseRecipe]:
        mark, name = self.marks[("method",)], self.values["method"]
        if not isinstance(name, str):
            raise RecipeError(
                [Problem(mark, "method", f"got {shown(name)}, expected a method's name", "name the method")]
            )
        try:
            return schema_for_method(name)
        except ConfigError as error:
            raise RecipeError([Problem(mark, "method", error.cause, error.fix)]) from error

    def take_smoke(self) -> list[tuple[KeyPath, Any, Mark]]:
        """The section `smoke` out of the values, as overrides with the lines that they stand on."""
        section = self.values.pop("smoke", None)
        lines = {path[1:]: mark for path, mark in self.marks.items() if path[0] == "smoke"}
        self._forget(("smoke",))
        if section is None:
            return []
        if not isinstance(section, dict):
            raise RecipeError(
                [Problem(lines[()], "smoke", f"got {shown(section)}, expected a mapping of sections", "write sections")]
            )
        found: list[tuple[KeyPath, Any, Mark]] = []
        waiting: list[tuple[KeyPath, Any]] = [((str(key),), value) for key, value in section.items()]
        while waiting:
            path, value = waiting.pop(0)
            if isinstance(value, dict) and value:
                waiting += [((*path, str(key)), item) for key, item in value.items()]
            else:
                found.append((path, value, lines.get(path, lines[()])))
        return found

    def merge(self, path: KeyPath, value: Any, mark: Mark, schema: type[BaseRecipe]) -> None:
        """Deep-merge an override of `--smoke`: lists are replaced whole, None sets null or, where the schema takes no
        null, brings the default back."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.merge((*path, str(key)), item, mark, schema)
            return
        section = self._open(path, mark)
        self._forget(path)
        if value is None and not accepts_null(schema, path):
            section.pop(str(path[-1]), None)
            self.dropped[path] = mark
        else:
            section[str(path[-1])] = value
            self.marks[path] = mark

    def apply(self, overrides: Sequence[str], schema: type[BaseRecipe]) -> None:
        """Assign every `--set` in order; the last one of a key counts."""
        problems: list[Problem] = []
        for override in overrides:
            try:
                self._assign(override, schema)
            except RecipeError as error:
                problems.extend(error.problems)
        if problems:
            raise RecipeError(problems)

    def _assign(self, override: str, schema: type[BaseRecipe]) -> None:
        key, equals, text = override.partition("=")
        key = key.strip()
        mark = Mark(f"--set {key}", rank=_SET_RANK)
        usage = "write --set key.path=value, for example --set run.steps=2"
        if not equals:
            bare = Mark("--set", rank=_SET_RANK)
            raise RecipeError([Problem(bare, "", f"{shown(override)} has no '='", usage)])
        if not _KEY.match(key):
            bare = Mark("--set", rank=_SET_RANK)
            raise RecipeError([Problem(bare, "", f"{shown(key)} is no dotted key", usage)])
        path: KeyPath = tuple(key.split("."))
        if path[0] == "method":
            fix = "name a recipe of that method"
            raise RecipeError([Problem(mark, "", "the method is fixed by the recipe's first key", fix)])
        value, _ = parse(text, mark)
        for target in self._targets(path):
            self._check_way(target, mark, schema)
            section = self._open(target, mark)
            self._forget(target)
            section[str(target[-1])] = value
            self.marks[target] = mark

    def _targets(self, path: KeyPath) -> list[KeyPath]:
        """The places that a key stands for: `model.checkpoint` is every policy's where the recipe names policies."""
        policies = self.values.get("policies")
        if path == ("model", "checkpoint") and isinstance(policies, dict) and policies and not self.values.get("model"):
            return [("policies", name, "checkpoint") for name in policies]
        return [path]

    def _check_way(self, path: KeyPath, mark: Mark, schema: type[BaseRecipe]) -> None:
        """Every step above the last key must be a section, in the values as well as in the schema."""
        current: Any = self.values
        for depth, part in enumerate(path[:-1], start=1):
            above = path[:depth]
            current = current.get(str(part)) if isinstance(current, dict) else None
            if isinstance(current, list):
                fix = f"lists are replaced whole: --set '{dotted(above)}=[a, b]'"
                raise RecipeError([Problem(mark, "", f"{dotted(above)} is a list", fix)])
            known = annotations_at(schema, above)
            if (current is not None and not isinstance(current, dict)) or (known and not is_section(schema, above)):
                given = "" if current is None or isinstance(current, dict) else f" ({shown(current, dotted(above))})"
                fix = f"set it whole: --set {dotted(above)}=VALUE"
                raise RecipeError([Problem(mark, "", f"{dotted(above)} is a single value{given}, not a section", fix)])

    def _open(self, path: KeyPath, mark: Mark) -> dict[str, Any]:
        """The mapping that holds the last key of `path`, made where it is missing."""
        current = self.values
        for depth, part in enumerate(path[:-1], start=1):
            below = current.get(str(part))
            if not isinstance(below, dict):
                self._forget(path[:depth])
                below = current[str(part)] = {}
                self.marks[path[:depth]] = mark
            current = below
        return current

    def _forget(self, path: KeyPath) -> None:
        for known in [place for place in self.marks if place[: len(path)] == path]:
            del self.marks[known]

    def validate(self, schema: type[BaseRecipe]) -> BaseRecipe:
        """One strict validation, by JSON's rules: a list may be a tuple, a whole number a float; text is no number."""
        secrets = [
            Problem(mark, dotted(path), "a secret in a recipe", _SECRET_FIX)
            for path, mark in self.marks.items()
            if is_secret(dotted(path), self._value(path))
            and (not annotations_at(schema, path) or _token(self._value(path)))
        ]
        if secrets:
            raise RecipeError(secrets)
        try:
            return schema.model_validate_json(json.dumps(self.values), strict=True)
        except ValidationError as error:
            problems = {problem: None for detail in error.errors() for problem in self._explain(detail, schema)}
            raise RecipeError(problems) from error

    def _value(self, path: KeyPath) -> Any:
        current: Any = self.values
        for part in path:
            current = current[part]
        return current

    def _mark(self, path: KeyPath) -> Mark:
        """The mark of the nearest key at or above `path`."""
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.marks:
                return self.marks[path[:depth]]
        return Mark(self.label)

    def _place(self, location: Sequence[str | int], missing: bool) -> KeyPath:
        """pydantic's location without the names of union members, which stand in no file."""
        path: list[str | int] = []
        current: Any = self.values
        for index, part in enumerate(location):
            if isinstance(current, dict) and str(part) in current:
                part = str(part)
                current = current[part]
            elif isinstance(current, list) and isinstance(part, int) and part < len(current):
                current = current[part]
            elif not (missing and index == len(location) - 1):
                continue
            path.append(part)
        return tuple(path)

    def _explain(self, detail: ErrorDetails, schema: type[BaseRecipe]) -> list[Problem]:
        kind = detail["type"]
        missing = kind == "missing" and isinstance(detail["loc"][-1], str)  # an item missing in a list is a wrong list
        path = self._place(detail["loc"], missing)
        if missing:
            return self._missing(schema, path)
        if kind in ("value_error", "assertion_error"):
            return [self._from_validator(schema, path, str(detail["ctx"]["error"]))]
        key, value, mark = dotted(path), self._value(path), self._mark(path)
        given = shown(value, key)
        if kind == "extra_forbidden":
            return [Problem(mark, key, f"unknown key (given {given})", unknown_key_fix(schema, path))]
        wanted = expectation(schema, path) or detail["msg"]
        return [Problem(mark, key, f"got {given}, expected {wanted}", wrong_value_fix(schema, path, value))]

    def _missing(self, schema: type[BaseRecipe], path: KeyPath) -> list[Problem]:
        """A missing key, or each required key of a missing section."""
        found: list[Problem] = []
        for annotation in annotations_at(schema, path):
            for model in models_in(annotation):
                for name, field in model.model_fields.items():
                    if field.is_required():
                        found.extend(self._missing(schema, (*path, name)))
        if found:
            return found
        wanted = expectation(schema, path)
        fix = f"add {dotted(path)}: {wanted}" if wanted else f"add {dotted(path)}"
        return [Problem(self._mark(path[:-1]), dotted(path), "a required key is missing", fix)]

    def _from_validator(self, schema: type[BaseRecipe], path: KeyPath, text: str) -> Problem:
        """A validator's own words, `cause; fix`. The key that it begins with, if it does, tells the line."""
        text = " ".join(text.split())
        head, _, rest = text.partition(": ")
        named: KeyPath = (*path, *head.split(".")) if _KEY.match(head) else path
        first: KeyPath = (*path, text.split(" ", 1)[0])
        if named != path and named in self.marks:
            path, text = named, rest.strip()
        elif first in self.marks:
            path = first
        message, _, fix = text.rpartition("; ") if "; " in text else (text, "", "")
        options = keys_of(schema, path)
        fallback = f"change {dotted(path)}" if path and not options else "change the keys named here"
        return Problem(self._mark(path), dotted(path), message, fix or fallback)

    def origins(self, tree: BaseRecipe) -> dict[str, str]:
        found: dict[str, str] = {}
        self._collect(tree.model_dump(mode="json"), (), found)
        return found

    def _collect(self, value: Any, path: KeyPath, found: dict[str, str]) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self._collect(item, (*path, key), found)
            return
        mark = self.marks.get(path) or self._inside_assigned(path)
        found[dotted(path)] = "default" if mark is None else "--set" if mark.rank == _SET_RANK else mark.text

    def _inside_assigned(self, path: KeyPath) -> Mark | None:
        """The mark of a leaf inside a mapping that one override assigned whole, or of one that --smoke dropped."""
        for depth in range(len(path), 0, -1):
            above = path[:depth]
            if above in self.dropped:
                return self.dropped[above]
            if above in self.marks:
                return self.marks[above] if self.marks[above].rank and self._holds(path) else None
        return None

    def _holds(self, path: KeyPath) -> bool:
        current: Any = self.values
        for part in path:
            if not isinstance(current, dict) or part not in current:
                return False
            current = current[part]
        return True


def _token(value: Any) -> bool:
    """Whether the value itself looks like an access token, whatever its key."""
    return is_secret("", value)
