"""Which problem of which contest a task is, so that one worded anew is still known for the same (MAPPA M-32).

The text of a problem differs between collections (LaTeX, spaces, a cut figure); its contest, year and number do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.types import Task

_YEARS = range(1900, 2101)
_NUMBERS = range(1, 51)
_NUMBER_COLUMNS = ("problem_number", "problem number", "number", "problem_idx")
_CONTEST_COLUMNS = ("contest", "competition", "source")
_SOURCES = ("link", "url")

# 2024-II-5, 2025_AIME_I_3, aime-2025-i-3, 2022_AMC_12A_Problems/Problem_3, "2019 AIME I Problems/Problem 4"
_NAMED = re.compile(
    r"(?:(?P<before>[a-z]{3,5})[\s_/-]*)?(?P<year>(?:19|20)\d\d)[\s_/-]*(?:(?P<contest>aime|amc|ahsme|ajhsme|usamo)[\s_-]*)?"
    r"(?:(?P<level>8|10|12)(?=[ab\s_-]))?[\s_-]*(?P<part>ii|i|a|b)?(?:[\s_/-]+(?:problems?[\s_/-]*)*|#)(?P<number>\d{1,2})$"
)
_CONTESTS = ("aime", "amc", "ahsme", "ajhsme", "usamo")


@dataclass(frozen=True, slots=True)
class ContestKey:
    """`contest` such as "aime" or "amc12", `part` such as "ii" or "a"; None where the data does not tell."""

    year: int
    number: int
    contest: str | None = None
    part: str | None = None


def contest_key(task: Task) -> ContestKey | None:
    """The key of a contest problem: from its columns year and problem_number (with contest and part, where there are
    any), else from an address, a name or an id that spells it; None for any other task."""
    info = {str(name).casefold(): value for name, value in task.info.items()}
    year, number = _whole(info.get("year")), next((n for c in _NUMBER_COLUMNS if (n := _whole(info.get(c)))), None)
    named = next((k for text in (*(info.get(c) for c in _SOURCES), task.id) if (k := _spelled(text))), None)
    if year in _YEARS and number in _NUMBERS:
        assert year is not None
        assert number is not None
        contest, part = _contest(info), _part(info.get("part"))
        if named is not None and (named.year, named.number) == (year, number):
            contest, part = contest or named.contest, part or named.part
        return ContestKey(year, number, contest, part)
    return named


def same_problem(one: ContestKey, two: ContestKey | None) -> bool:
    """Whether two keys name one problem. What one of them does not tell cannot keep them apart: a held-out problem that
    might be a training one counts as it."""
    if two is None or (one.year, one.number) != (two.year, two.number):
        return False
    pairs = ((one.contest, two.contest), (one.part, two.part))
    return all(a is None or b is None or a == b for a, b in pairs)


def _spelled(text: Any) -> ContestKey | None:
    if not isinstance(text, str):
        return None
    found = _NAMED.search(text.strip().casefold())
    if found is None:
        return None
    number, contest = int(found["number"]), found["contest"] or found["before"]
    if number not in _NUMBERS or (found["before"] and contest not in _CONTESTS):
        return None
    if contest is None and found["part"] is None:
        return None  # 2024-05 may be a date
    level = found["level"] or ""
    return ContestKey(int(found["year"]), number, f"{contest}{level}" if contest else None, _part(found["part"]))


def _contest(info: Mapping[str, Any]) -> str | None:
    for column in _CONTEST_COLUMNS:
        text = str(info.get(column) or "").casefold()
        found = re.search(r"(aime|amc|ahsme|ajhsme|usamo)[\s_-]*(8|10|12)?", text)
        if found:
            return found[1] + (found[2] or "")
    return None


def _part(value: Any) -> str | None:
    text = str(value).strip().casefold() if value is not None else ""
    return {"1": "i", "2": "ii"}.get(text, text) if text in ("i", "ii", "1", "2", "a", "b") else None


def _whole(value: Any) -> int | None:
    """A whole number, whether the file has it as a number or as text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()) else None
