"""Short answers: a table of what counts as equal, and what is missing instead of zero."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.grading.qa import F1, ExactMatch, exact_match, f1, normalise
from agentrl.types import Score, Task, Trajectory


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),
        ("well-known", "wellknown"),
        ("U.S.A.", "usa"),
        ("\u201cCuriosity\u201d \u2014 killed", "curiosity killed"),
        ("ＡＢＣ１", "abc1"),
        ("Cafe\u0301", "café"),
        ("STRASSE", "strasse"),
        ("Straße", "strasse"),
        ("\u00a0two\n words\t", "two words"),
        ("A", "a"),
        ("The", "the"),
        ("$5", "5"),
        ("?!\u2026", ""),
        ("", ""),
        ("北京。", "北京"),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "references", "match", "score"),
    [
        ("the Eiffel Tower.", ["Eiffel tower"], True, 1.0),
        ("Eiffel", ["Eiffel Tower"], False, 2 / 3),
        ("Tower Eiffel", ["Eiffel Tower"], False, 1.0),
        ("Samuel Clemens", ["Mark Twain", "samuel clemens"], True, 1.0),
        ("", ["Mark Twain"], False, 0.0),
        ("...", ["Mark Twain"], False, 0.0),
        ("the", ["a"], False, 0.0),
        ("", ["A", "!"], False, 0.0),
        ("x x y", ["x y y"], False, 2 / 3),
        ("I think it is Paris", ["Paris"], False, 1 / 3),
        ("yes", ["no"], False, 0.0),
        ("1,000", ["1000"], True, 1.0),
    ],
)
def test_exact_match_and_f1(answer: str, references: list[str], match: bool, score: float) -> None:
    assert exact_match(answer, references) is match
    assert f1(answer, references) == pytest.approx(score)


@pytest.mark.parametrize("references", [[], [""], ["?!", " "]])
def test_references_that_say_nothing_are_a_fault_and_never_a_match(references: list[str]) -> None:
    for grader in (exact_match, f1):
        with pytest.raises(ValueError, match="no reference"):
            grader("", references)


def _score(reward: ExactMatch | F1, answer: Any, references: tuple[Any, ...] = ("Ann Lee",), **more: Any) -> Score:
    task = Task("q", "who?", references)
    return asyncio.run(reward.score(task, Trajectory("q/0", task, 0, (), answer, **{"status": "ok", **more})))


@pytest.mark.parametrize("reward", [ExactMatch(), F1()])
def test_a_missing_answer_is_a_true_zero_and_a_failing_grader_is_missing(reward: ExactMatch | F1) -> None:
    assert _score(reward, "ann lee") == Score(1.0, "match")
    assert _score(reward, None) == Score(0.0, "no answer")
    assert _score(reward, "") == Score(0.0, "no match")
    assert _score(reward, None, status="turn_limit").value == 0.0
    for score in (
        _score(reward, "x", ()),
        _score(reward, None, ("?",)),
        _score(reward, 3),
        _score(reward, "x", (None,)),
        _score(reward, "ann lee", status="failed", status_reason="tool died"),
    ):
        assert score.missing
        assert score.reason
    assert "tool died" in str(_score(reward, None, status="failed", status_reason="tool died").reason)


def test_partial_credit_is_told() -> None:
    assert _score(F1(), "Ann") == Score(pytest.approx(2 / 3), "partial match")
    assert _score(ExactMatch(), "Ann") == Score(0.0, "no match")
