"""A recipe before validation: its values as file, `--smoke` and `--set` made them, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.explain import accepts_null, annotations_at, is_section
from agentrl.config.faults import KEY, Refused, value_at
from agentrl.config.problems import Mark, Problem, RecipeError, is_secret, shown
from agentrl.config.schema import BaseRecipe
from agentrl.config.source import KeyPath, dotted, parse, read_text
from agentrl.errors import ConfigError

SMOKE = Mark("smoke", rank=1)
_SET_RANK = 2
_SECRET_FIX = "keep the secret in an environment variable, and name that variable instead"


@dataclass(frozen=True, slots=True)
class SmokeLeaf:
    """A value of a recipe's section `smoke`, with the marks of its key and of what stands below it."""

    path: KeyPath
    value: Any
    marks: Mapping[KeyPath, Mark]


class Draft:
    """The merged values before validation, and the mark of every key."""

    def __init__(self, values: dict[str, Any], marks: dict[KeyPath, Mark], label: str) -> None:
        self.values = values
        self.marks = marks
        self.label = label
        self.dropped: dict[KeyPath, Mark] = {}

    @classmethod
    def read(cls, source: Path, label: str) -> Draft:
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

    def take_smoke(self) -> list[SmokeLeaf]:
        """The section `smoke` out of the values, leaf by leaf. Raises `RecipeError` for what is no section."""
        section = self.values.pop("smoke", None)
        lines = {path[1:]: mark for path, mark in self.marks.items() if path[0] == "smoke"}
        self._forget(("smoke",))
        if section is None:
            return []
        if not isinstance(section, dict):
            raise RecipeError(
                [Problem(lines[()], "smoke", f"got {shown(section)}, expected a mapping of sections", "write sections")]
            )
        found: list[SmokeLeaf] = []
        waiting: list[tuple[KeyPath, Any]] = [((str(key),), value) for key, value in section.items()]
        while waiting:
            path, value = waiting.pop(0)
            if isinstance(value, dict) and value:
                waiting += [((*path, str(key)), item) for key, item in value.items()]
            else:
                inside = {place: mark for place, mark in lines.items() if place[: len(path)] == path}
                found.append(SmokeLeaf(path, value, inside))
        return found

    def cut_down(self, own: Sequence[SmokeLeaf], schema: type[BaseRecipe]) -> None:
        """Merge the method's own cut for `--smoke`, then the recipe's."""
        for key, value in schema.smoke_of(self.values).items():
            self.merge(tuple(key.split(".")), value, SMOKE, schema)
        for leaf in own:
            self.merge(leaf.path, leaf.value, leaf.marks[leaf.path], schema)
            self.marks.update(leaf.marks if leaf.path in self.marks else {})

    def copy(self) -> Draft:
        return Draft(deepcopy(self.values), dict(self.marks), self.label)

    def merge(self, path: KeyPath, value: Any, mark: Mark, schema: type[BaseRecipe]) -> None:
        """Deep-merge an override of `--smoke`: lists are replaced whole, None sets null or, where the schema takes no
        null, brings the default back. What the schema does not know stays, for validation to refuse it."""
        known = bool(annotations_at(schema, path))
        if isinstance(value, Mapping) and (value or known):
            for key, item in value.items():
                self.merge((*path, str(key)), item, mark, schema)
            return
        section = self._open(path, mark)
        self._forget(path)
        if value is None and known and not accepts_null(schema, path):
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
        if not KEY.match(key):
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
        """The mapping that holds the last key of `path`, made where it is missing. Raises where it is no mapping."""
        current = self.values
        for depth, part in enumerate(path[:-1], start=1):
            below = current.get(str(part))
            if below is not None and not isinstance(below, dict):
                place, key = self.marks[path[:depth]], dotted(path[:depth])
                fix = f"write the keys of {key} below it"
                raise RecipeError([Problem(place, key, f"got {shown(below, key)}, expected a mapping of keys", fix)])
            if below is None:
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
            if is_secret(dotted(path), value_at(self.values, path))
            and (not annotations_at(schema, path) or _token(value_at(self.values, path)))
        ]
        if secrets:
            raise RecipeError(secrets)
        try:
            return schema.model_validate_json(json.dumps(self.values), strict=True)
        except ValidationError as error:
            raise RecipeError(Refused(self.values, self.marks, self.label).problems(error, schema)) from error

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
