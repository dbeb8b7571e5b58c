"""From a schema's refusal to located faults: which line, which dotted key, what was expected, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.explain import annotations_at, expectation, keys_of, models_in, unknown_key_fix, wrong_value_fix
from agentrl.config.problems import Mark, Problem, shown
from agentrl.config.schema import BaseRecipe
from agentrl.config.source import KeyPath, dotted

KEY = re.compile(r"^[^\s.=]+(\.[^\s.=]+)*$")
"""A dotted key."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Values that a schema refused, with the marks of their keys; `label` names the file."""

    values: Mapping[str, Any]
    marks: Mapping[KeyPath, Mark]
    label: str

    def problems(self, error: ValidationError, schema: type[BaseRecipe]) -> list[Problem]:
        """Every fault of a refusal, once."""
        found = (problem for detail in error.errors() for problem in self._explain(detail, schema))
        return list(dict.fromkeys(found))

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
        key, value, mark = dotted(path), value_at(self.values, path), self._mark(path)
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
        named: KeyPath = (*path, *head.split(".")) if KEY.match(head) else path
        first: KeyPath = (*path, text.split(" ", 1)[0])
        if named != path and named in self.marks:
            path, text = named, rest.strip()
        elif first in self.marks:
            path = first
        message, _, fix = text.rpartition("; ") if "; " in text else (text, "", "")
        options = keys_of(schema, path)
        fallback = f"change {dotted(path)}" if path and not options else "change the keys named here"
        return Problem(self._mark(path), dotted(path), message, fix or fallback)


def value_at(values: Mapping[str, Any], path: KeyPath) -> Any:
    """The value at a path that is there."""
    current: Any = values
    for part in path:
        current = current[part]
    return current
