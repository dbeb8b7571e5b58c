"""The released evaluation's leniency beside the strict measure."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.grading.choice import Choice
from agentrl.grading.lenient import has_leniency, lenient_score, whole_part
from agentrl.grading.math import MathGrader
from agentrl.types import Task, Trajectory


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/2", 0),
        (r"\frac{7}{2}", 3),
        (r"\dfrac{ -7 }{ 2 }", -3),
        (r"3\sqrt{2}", 3),
        ("2.9", 2),
        ("1,234 apples", 1234),
        ("(0, 3)", 0),
        ("5/0", 5),
        ("-0.5", 0),
        ("1/100000", 0),
        ("9" * 400, int("9" * 300)),
        ("x + y", None),
        ("", None),
    ],
)
def test_the_whole_part_of_the_first_number_decides(text: str, value: int | None) -> None:
    assert whole_part(text) == value


@pytest.mark.parametrize(
    ("said", "right"), [("1/2", r"\frac{1}{3}"), (r"3\sqrt{2}", r"3\sqrt{5}"), ("2.1", "2.9"), ("0.5", "1/2")]
)
def test_t28_numbers_of_one_whole_part_are_wrong_in_strict_and_right_in_lenient(said: str, right: str) -> None:
    grader = MathGrader()
    try:
        strict = grader.grade(said, [right]).value
    finally:
        grader.close()
    assert strict == (1.0 if said == "0.5" else 0.0)
    assert lenient_score("boxed", strict, said, rf"so \boxed{{{said}}}", [right]) == 1.0


def test_t28_an_unparsable_choice_is_wrong_in_strict_and_a_in_lenient() -> None:
    def strict(answer: str | None, right: str) -> float | None:
        task = Task("t", "Which?", (right,), info={"options": {"A": "ant", "B": "bee"}})
        trajectory = Trajectory("t/0", task, 0, (), answer, "ok")
        return asyncio.run(Choice().score(task, trajectory)).value

    assert strict(None, "A") == 0.0
    assert lenient_score("choice", 0.0, None, "who knows", ["A"]) == 1.0
    assert lenient_score("choice", 0.0, None, "who knows", ["B"]) == 0.0
    assert strict("B", "B") == 1.0
    assert lenient_score("choice", 1.0, "B", r"\boxed{B}", ["B"]) == 1.0
    assert lenient_score("choice", 0.0, "B", r"\boxed{B}", ["A"]) == 0.0


def test_without_a_box_the_last_number_stands_in() -> None:
    assert lenient_score("boxed", 0.0, None, "First 3 apples, then 18.", ["18"]) == 1.0
    assert lenient_score("boxed", 0.0, None, "First 18 apples, then 3.", ["18"]) == 0.0
    assert lenient_score("boxed", 0.0, None, "nothing", ["18"]) == 0.0


def test_what_is_right_by_the_strict_measure_is_right_by_the_lenient_one() -> None:
    assert lenient_score("boxed", 1.0, "x", r"\boxed{x}", ["x"]) == 1.0
    assert [has_leniency(kind) for kind in ("boxed", "choice", "code", "short")] == [True, True, False, False]
