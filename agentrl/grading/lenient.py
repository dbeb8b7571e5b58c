"""The released evaluation's leniency, so that numbers can be compared with published ones. Never our own measure.

Mathematics: simple fractions become decimals, then the whole part of the first number decides: 1/2 equals 1/3, 2.1
equals 2.9, 3 sqrt(2) equals 3 sqrt(5). Multiple choice: an answer from which no letter can be read counts as "A".
Whatever is right by the strict measure is right here too. Not reproduced: where no box was written, the released code
asks the model once more for 16 tokens; here the last number of the text stands in for that.

Source: the released code of "Recursive Multi-Agent Systems", arXiv 2604.25917.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentrl.grading.math_worker import last_boxed

_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d{1,15}(?:\.\d{1,15})?)\s*\}\s*\{\s*(\d{1,15}(?:\.\d{1,15})?)\s*\}")
_RATIO = re.compile(r"(-?\d{1,15}(?:\.\d{1,15})?)\s*/\s*(\d{1,15}(?:\.\d{1,15})?)")
_NUMBER = re.compile(r"-?\d{1,300}(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
DEFAULT_LETTER = "A"


def whole_part(text: str) -> int | None:
    """The whole part of a text's first number, fractions taken as decimals; None where there is no number."""
    plain = _THOUSANDS.sub("", text)
    for fraction in (_FRACTION, _RATIO):
        plain = fraction.sub(_decimal, plain)
    found = _NUMBER.search(plain)
    return None if found is None else int(found[0].partition(".")[0])


def same_number(text: str, references: Sequence[str]) -> bool:
    """Whether the whole part of the answer's first number is that of a reference's. The answer is the last box of the
    text, else its last number."""
    said = last_boxed(text)
    if said is None:
        numbers = _NUMBER.findall(_THOUSANDS.sub("", text))
        said = numbers[-1] if numbers else ""
    value = whole_part(said)
    return value is not None and any(value == whole_part(reference) for reference in references)


def same_choice(letter: str | None, references: Sequence[str]) -> bool:
    """Whether the letter, "A" where none could be read, is a reference."""
    return (letter or DEFAULT_LETTER) in references


def lenient_score(kind: str, strict: float | None, answer: str | None, text: str, references: Sequence[str]) -> float:
    """1.0 or 0.0: right by the strict measure, or by the leniency of this kind of answer.

    `kind` is "boxed" or "choice"; other kinds have no leniency, see `has_leniency`. `answer` is what was read from
    `text` in the form asked for.
    """
    rules: dict[str, Callable[[], bool]] = {
        "boxed": lambda: same_number(text, references),
        "choice": lambda: same_choice(answer, references),
    }
    return float(strict == 1.0 or rules[kind]())


def has_leniency(kind: str) -> bool:
    """Whether the released evaluation is lenient with this kind of answer; programs and short answers it runs and
    compares as we do."""
    return kind in ("boxed", "choice")


def _decimal(found: re.Match[str]) -> str:
    over, under = float(found[1]), float(found[2])
    return found[0] if under == 0 else f"{over / under:.9f}"
