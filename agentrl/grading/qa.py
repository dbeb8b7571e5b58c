"""Short answers against references: exact match and token F1 after SQuAD's normalisation.

Rajpurkar et al. 2016, "SQuAD", section 6.1 and its evaluation script: lower case, no punctuation, no articles, one
space. Deviations: Unicode forms are unified first (NFKC, case folding), Unicode punctuation goes as ASCII's does, and
articles stay in a text of nothing else, so that "A" is not the empty answer.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from agentrl.types import Score, Task, Trajectory

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """An answer as it is compared. May be empty: punctuation alone says nothing."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(c for c in plain if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    return " ".join(_ARTICLES.sub(" ", plain).split()) or " ".join(plain.split())


def exact_match(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer equals one of the references. Raises `ValueError` when no reference says anything."""
    return normalise(answer) in _usable(references)


def f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 of the answer's words with a reference's, repeats counted. Raises `ValueError` as `exact_match`."""
    return max(_f1(normalise(answer).split(), reference.split()) for reference in _usable(references))


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def _usable(references: Sequence[str]) -> list[str]:
    usable = [text for text in map(normalise, references) if text]
    if not usable:
        raise ValueError(f"no reference answer: {list(references)!r}")
    return usable


class ExactMatch:
    """A `Reward`: 1 when the answer equals a reference, else 0."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return _grade(lambda answer, references: float(exact_match(answer, references)), task, trajectory)


class F1:
    """A `Reward`: token F1 with the best reference, from 0 to 1."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return _grade(f1, task, trajectory)


def _grade(grader: Callable[[str, Sequence[str]], float], task: Task, trajectory: Trajectory) -> Score:
    """A missing answer is a true 0; a failed rollout, a task without a reference and a failing grader are missing."""
    if trajectory.status == "failed":
        return Score(None, f"rollout failed: {trajectory.status_reason}")
    try:
        if trajectory.answer is None:
            _usable(task.references)
            return Score(0.0, "no answer")
        value = grader(trajectory.answer, task.references)
    except Exception as error:  # noqa: BLE001 - a grader that fails gives a missing score, never a zero
        return Score(None, f"grader failed: {type(error).__name__}: {error}")
    return Score(value, "match" if value == 1 else "no match" if value == 0 else "partial match")
