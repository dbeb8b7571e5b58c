"""Choice letters: what an answer settles on, and nothing it merely mentions."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.grading.choice import Choice, letter
from agentrl.types import Score, Task, Trajectory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(C)", "C"),
        ("[D].", "D"),
        ("**A**", "A"),
        ("B.", "B"),
        ("\\boxed{C}", "C"),
        ("\\boxed{\\text{C}}", "C"),
        ("It could be B, so \\boxed{D}", "D"),
        ("The answer is C.", "C"),
        ("the correct answer is (b)", "B"),
        ("Answer: D", "D"),
        ("Final answer: **A**", "A"),
        ("The correct option is B because A is wrong.", "B"),
        ("The answer is C. I repeat, the answer is C.", "C"),
        ("B) the river", "B"),
        ("C. because it is", "C"),
        ("A dog", None),
        ("I think so", None),
        ("The answer is B. No, the answer is C.", None),
        ("The answer is best", None),
        ("A or B", None),
        ("", None),
        ("42", None),
        ("Z", None),
    ],
)
def test_the_letter_an_answer_settles_on(text: str, expected: str | None) -> None:
    assert letter(text, num_options=5) == expected


def _score(answer: str | None, references: tuple[str, ...], options: object = None, status: str = "ok") -> Score:
    task = Task("t", "q", references, info={} if options is None else {"options": options})
    trajectory = Trajectory("t/0", task, 0, (), answer, status, "broke")  # type: ignore[arg-type]
    return asyncio.run(Choice().score(task, trajectory))


CITIES = ["Paris", "The Hague", "A Coruna", "Bern"]


def test_a_choice_is_graded_by_letter_or_by_the_options_words() -> None:
    assert _score("(B)", ("B",)).value == 1.0
    assert _score("the hague", ("B",), CITIES).value == 1.0
    assert _score("A Coruna", ("C",), CITIES).value == 1.0
    assert _score("B", ("The Hague",), CITIES).value == 1.0
    assert _score("B", ("B",), {"a": "x", "b": "y"}).value == 1.0
    assert _score("Paris", ("B",), CITIES) == Score(0.0, "no match")
    assert _score("E", ("B",), CITIES) == Score(0.0, "no choice")


def test_no_answer_is_zero_and_a_bad_reference_or_rollout_missing() -> None:
    assert _score(None, ("B",)) == Score(0.0, "no answer")
    assert _score("B", ("F",), CITIES).missing
    assert _score("B", ()).missing
    assert _score("B", ("Rome",), CITIES).missing
    assert _score("B", ("B",), status="failed") == Score(None, "rollout failed: broke")
