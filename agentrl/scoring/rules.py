"""Built-in rules: scores of actions from evidence in the view alone, without a model.

They see only what any coach sees, and they are a floor to compare with: what they cannot see is what a model is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from agentrl.protocols import CoachView

Rule = Callable[[CoachView], tuple[float, str]]
"""A score from 0 to 10 and its reason."""

_ERRORS = re.compile(
    r"Traceback \(most recent call last\)|^\s*\w*(?:Error|Exception)\b(?::|$)|^error:|\btimed? ?out\b",
    re.IGNORECASE | re.MULTILINE,
)
_FILE_ERRORS = re.compile(r"FileNotFoundError|No such file", re.IGNORECASE)
_REFUSALS = re.compile(r"\bI (?:cannot|can't|am unable to|will not)\b|\bas an AI\b", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")


def artifacts(view: CoachView) -> tuple[float, str]:
    """3 for an agent that left out a file it must save, 6 for one whose input lacks a file of another's, else 8.

    An agent hit from upstream is not blamed for its own files: without its inputs it cannot make them.
    """
    upstream, missing = view.ledger.get("missing_upstream") or {}, view.ledger.get("missing") or ()
    if upstream:
        name, who = next(iter(upstream.items()))
        return 6.0, f"worked without {name}, which {who} did not save"
    if missing:
        return 3.0, f"did not save {', '.join(missing)}"
    return 8.0, "every file is there"


def evidence(view: CoachView) -> tuple[float, str]:
    """All that can be seen without understanding: emptiness, repetition, errors, missing files, the reference.

    Blame as in `artifacts`; a program that failed for want of another agent's file is not blamed.
    """
    action = view.action.strip()
    if len(action) < 2:
        return 0.0, "said nothing"
    if _repeats(action):
        return 1.0, "repeats itself"
    upstream = bool(view.ledger.get("missing_upstream"))
    feedback = view.feedback or ""
    failed = _ERRORS.search(feedback) is not None
    if failed and upstream and _FILE_ERRORS.search(feedback):
        return 6.0, "failed for want of another agent's file"
    if failed:
        return 2.0, "its program failed"
    if view.ground_truth is not None and (said := _final(action)) is not None:
        right = _plain(said) == _plain(view.ground_truth)
        return (9.0, "agrees with the reference") if right else (1.0, "differs from the reference")
    if _REFUSALS.search(action):
        return 2.0, "refuses"
    score, reason = artifacts(view)
    if score == 8.0 and view.feedback is not None and not feedback.strip():
        return 5.0, "its program printed nothing"
    return score, reason


def _repeats(text: str) -> bool:
    """Whether most of a longer text says the same few words again."""
    words = text.split()
    if len(words) < 40:
        return False
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(grams)) < len(grams) / 3


def _final(action: str) -> str | None:
    """The answer that an action settles on: its last box, or what stands in its last answer tag."""
    boxes: list[str] = _BOXED.findall(action)
    if boxes:
        return boxes[-1]
    tags: list[str] = re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL)
    return tags[-1] if tags else None


def _plain(text: str) -> str:
    return re.sub(r"[\s$,]", "", text).casefold().strip(".")


RULES: Mapping[str, Rule] = MappingProxyType({"artifacts": artifacts, "evidence": evidence})
