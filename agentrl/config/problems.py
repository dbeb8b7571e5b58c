"""Located faults of a recipe: every one is listed, the first line first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.errors import ConfigError

_SECRET_KEY = re.compile(r"((api_?key|secret|password|passwd|credential)s?|(^|[._])token)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"^(sk-|hf_|gh[pousr]_|xox[bap]-|AKIA)\S{8,}$")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a value came from: a file's line, `--smoke` or `--set`. `rank` orders them by precedence."""

    label: str
    line: int | None = None
    rank: int = 0

    @property
    def text(self) -> str:
        return self.label if self.line is None else f"{self.label}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: where, at which dotted key (empty for the whole), what is wrong, and what to do."""

    mark: Mark
    key: str
    message: str
    fix: str

    @property
    def cause(self) -> str:
        return ": ".join(part for part in (self.mark.text, self.key, self.message) if part)


class RecipeError(ConfigError):
    """A recipe that cannot be used. `problems` holds every fault found, ordered by file line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.mark.rank, p.mark.line or 0)))
        super().__init__(self.problems[0].cause, self.problems[0].fix)

    @property
    def faults(self) -> tuple[tuple[str, str], ...]:
        return tuple((problem.cause, problem.fix) for problem in self.problems)


def is_secret(key: str, value: object) -> bool:
    """Whether a value must not be repeated: its key names a secret, or it looks like an access token."""
    return isinstance(value, str) and bool(_SECRET_KEY.search(key) or _SECRET_VALUE.match(value))


def shown(value: object, key: str = "") -> str:
    """A given value as a message shows it: short, one line, secrets hidden."""
    if is_secret(key, value):
        return "<hidden>"
    if isinstance(value, dict):
        return f"a mapping with the keys {shown_names(value)}" if value else "an empty mapping"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def shown_names(names: Iterable[str]) -> str:
    """Names in a row, at most twelve of them."""
    listed = [str(name)[:_SHOWN] for name in names]
    return ", ".join(listed[:12]) + (f", ... ({len(listed)} in all)" if len(listed) > 12 else "")
