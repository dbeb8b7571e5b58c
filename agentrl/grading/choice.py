"""Multiple choice: which letter does an answer settle on?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.grading.math_worker import last_boxed
from agentrl.grading.qa import normalise
from agentrl.types import Score, Task, Trajectory

_LETTER = r"[\s*_$(\[{\"']*(?:\\text\s*\{\s*)?\(?([A-Za-z])(?![A-Za-z])"
_ALONE = re.compile(rf"{_LETTER}[\s*_$)\]}}\"'.:,!]*")
_OPENS = re.compile(r"[\s*_(\[]*([A-Z])[)\].:](?:\s|\*|$)")
_STATED = re.compile(
    rf"\b(?:(?:final|correct|right|best)\s+)?(?:answer|option|choice)\b(?:\s+(?:choice|option))?\s*(?:is|[:=])(?:\s+option)?{_LETTER}",
    re.IGNORECASE,
)


def letter(text: str, num_options: int = 26) -> str | None:
    """The upper-case letter that a text settles on, among the first `num_options`; None for none or several.

    Read, in this order: the last box; a text that is a letter alone; the letters that follow "answer is" and the like,
    which must agree; a text that opens with "B)" or "B.". A letter elsewhere in prose says nothing ("A dog").
    """
    boxed = last_boxed(text)
    for candidate in [text] if boxed is None else [boxed]:
        alone = _ALONE.fullmatch(candidate.strip())
        if alone is not None:
            return _within(alone.group(1), num_options)
        stated = {m.upper() for m in _STATED.findall(candidate)}
        if stated:
            return _within(stated.pop(), num_options) if len(stated) == 1 else None
        opens = _OPENS.match(candidate)
        if opens is not None:
            return _within(opens.group(1), num_options)
    return None


class Choice:
    """A `Reward`: 1 when the answer settles on the reference's letter, or repeats its option's words, else 0.

    Options come from `task.info["options"]`: a list in the order of the letters, or a mapping from letters. Missing
    where the task's reference is neither a letter nor an option.
    """

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if trajectory.status == "failed":
            return Score(None, f"rollout failed: {trajectory.status_reason}")
        options = _options(task.info.get("options"))
        rights = {right for r in task.references if (right := _reference(r, options)) is not None}
        if not rights:
            return Score(None, "grader failed: the reference is neither a letter nor an option")
        if trajectory.answer is None or not trajectory.answer.strip():
            return Score(0.0, "no answer")
        said = _said(trajectory.answer, options)
        if said is None:
            return Score(0.0, "no choice")
        return Score(1.0, "match") if said in rights else Score(0.0, "no match")


def _within(found: str, num_options: int) -> str | None:
    upper = found.upper()
    return upper if ord(upper) - ord("A") < num_options else None


def _options(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(k).strip().upper(): str(v) for k, v in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return {chr(ord("A") + i): str(v) for i, v in enumerate(given)}
    return {}


def _said(answer: str, options: Mapping[str, str]) -> str | None:
    by_words = {normalise(words): name for name, words in options.items()}
    exact = by_words.get(normalise(last_boxed(answer) or answer))
    return exact or letter(answer, len(options) or 26)


def _reference(reference: str, options: Mapping[str, str]) -> str | None:
    bare = reference.strip().strip("().").upper()
    if len(bare) == 1 and bare.isascii() and bare.isalpha() and (not options or bare in options):
        return bare
    return {normalise(words): name for name, words in options.items()}.get(normalise(reference))
