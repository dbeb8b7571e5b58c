"""What kind of thing a table's column predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal["classification", "regression"]
_MAX_CLASSES = 10


def task_kind(columns: Sequence[Sequence[str]]) -> Kind:
    """Labels that are no numbers, two different values, or few different whole numbers are classes."""
    for column in columns:
        numbers = [as_number(value) for value in column]
        if any(n is None for n in numbers):
            return "classification"
        distinct = set(numbers)
        whole = all(n is not None and n.is_integer() for n in distinct)
        few = len(distinct) <= 2 or (whole and len(distinct) <= _MAX_CLASSES and 2 * len(distinct) <= len(column))
        if not few:
            return "regression"
    return "classification"


def as_number(value: str) -> float | None:
    """A cell as a number, NaN and infinities included; None for any other text."""
    try:
        return float(value) if "_" not in value else None
    except ValueError:
        return None
