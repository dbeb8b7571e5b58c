"""Reading replies: verdicts (MARS E1) and scores (MAPPA M-04). What is in doubt is a fault, never a number."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.scoring.replies import parse_rating, parse_verdict

_WHOLE = '{"extracted_answer": "Canberra", "reasoning": "same", "correct": "yes", "confidence": 90}'

VERDICTS = {
    _WHOLE: True,
    '{"extracted_answer": "None", "reasoning": "no answer", "correct": "no", "confidence": 100}': False,
    '{"correct": "yes"}': True,
    '{"correct": "NO"}': False,
    '{"correct": " Yes. "}': True,
    '{"correct": true}': True,
    '{"correct": false}': False,
    "```json\n" + _WHOLE + "\n```": True,
    '```\n{"correct": "no"}\n```': False,
    'Here is my ruling: {"correct": "no"}. Thank you.': False,
    '<think>It says "correct: yes" but no.</think>\n{"correct": "no"}': False,
    'half of the thinking</think>{"correct": "yes"}': True,
    '{"reasoning": "it says correct: yes\\ncorrect: yes", "correct": "no"}': False,
    '{"extracted_answer": "{\\"correct\\": \\"yes\\"}", "correct": "no"}': False,
    '{"correct": "yes"}\n{"correct": "yes"}': True,
    '{"note": 1} then {"correct": "yes"}': True,
    "yes": True,
    "No.": False,
    "  YES  ": True,
    "**no**": False,
    "correct: yes": True,
    "Correct: No": False,
    "**correct:** yes": True,
    "- correct: **no**": False,
    "verdict = yes": True,
    "extracted_final_answer: Paris\nreasoning: it differs\ncorrect: no\nconfidence: 80%": False,
    "reasoning: both name it.\n\ncorrect: yes.\n": True,
    '"yes"': True,
    "correct: yes\ncorrect: yes": True,
    "[no]": False,
    '["yes"]': True,
}

NO_VERDICTS = (
    "",
    "   ",
    ".",
    "maybe",
    "I think the answer is correct.",
    "incorrect",
    "correct",
    "correct: incorrect",
    "correct: yes and no",
    "yes, but no",
    "correct: yes\ncorrect: no",
    '{"correct": "yes"} {"correct": "no"}',
    '{"correct": "yes", "correct": "no"}',
    '{"correct": "partially"}',
    '{"correct": null}',
    '{"correct": 1}',
    '{"correct": ["yes"]}',
    '{"verdict": "yes"}',
    '{"correct": "yes"',
    "<think>correct: yes",
    '<think>still thinking {"correct": "yes"}',
    "1",
    "null",
    "The response says: correct: yes",
    "\x00",
    "[" * 50_000,
    '{"a":' * 20_000,
    "yes " * 40_000,
)


@pytest.mark.parametrize(("reply", "correct"), VERDICTS.items())
def test_e1_a_verdict_is_read(reply: str, correct: bool) -> None:
    assert parse_verdict(reply).correct is correct


@pytest.mark.parametrize("reply", NO_VERDICTS, ids=lambda r: r[:30] or "empty")
def test_e1_what_is_no_verdict_is_a_fault(reply: str) -> None:
    with pytest.raises(ValueError):
        parse_verdict(reply)


def test_e1_the_table_has_at_least_thirty_verdict_strings() -> None:
    assert len(VERDICTS) >= 30
    assert len(NO_VERDICTS) >= 20


def test_a_verdict_carries_what_the_judge_said() -> None:
    verdict = parse_verdict(_WHOLE)
    assert (verdict.extracted, verdict.reasoning, verdict.confidence) == ("Canberra", "same", 90.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("85", 85.0), ('"85%"', 85.0), ("101", None), ("true", None), ('"high"', None), ("-1", None)],
)
def test_a_confidence_out_of_form_is_none_and_spoils_no_verdict(given: str, expected: float | None) -> None:
    verdict = parse_verdict(f'{{"correct": "yes", "confidence": {given}}}')
    assert verdict.correct
    assert verdict.confidence == expected


RATINGS = {
    "12": 10.0,
    "7.5": 7.5,
    "[8]": 8.0,
    "-3": 0.0,
    "0": 0.0,
    "10": 10.0,
    "8/10": 8.0,
    "8 out of 10": 8.0,
    "**6**": 6.0,
    "6.": 6.0,
    '"7"': 7.0,
    "Score: 7": 7.0,
    "PROCESS_SCORE: 3.5": 3.5,
    "process_score: 11": 10.0,
    "**Score:** 4/10": 4.0,
    "Final score = 9": 9.0,
    "Ran without error, AUC 0.54.\nScore: 6": 6.0,
    '{"analysis": "AUC 0.54", "score": 6}': 6.0,
    '{"score": "6"}': 6.0,
    '{"score": 99}': 10.0,
    '{"analysis": "it wrote PROCESS_SCORE: 10\\nScore: 10", "score": 2}': 2.0,
    '```json\n{"score": 5}\n```': 5.0,
    "<think>Score: 9</think>Score: 4": 4.0,
    "1e1": 10.0,
}

NO_RATINGS = (
    "AUC 0.54",
    "ROC-AUC 0.54 and accuracy 0.81",
    ".",
    "",
    "-",
    "ten",
    "7/5",
    "80%",
    "7,5",
    "8/100",
    "the score is 7",
    "Score: 7\nScore: 8",
    "The agent wrote:\nPROCESS_SCORE: 10\nScore: 2",
    '{"analysis": "fine"}',
    '{"score": null}',
    '{"score": true}',
    '{"score": NaN}',
    '{"score": 1e999}',
    '{"score": [7]}',
    '{"score": "seven"}',
    '{"score": 3, "score": 9}',
    '{"score": 3} {"score": 9}',
    "[1, 2]",
    "NaN",
    "inf",
    "true",
    "<think>Score: 7",
    "9" * 5_000,
)


@pytest.mark.parametrize(("reply", "score"), RATINGS.items())
def test_m04_a_score_is_read_and_held_within_ten(reply: str, score: float) -> None:
    assert parse_rating(reply).score == score


@pytest.mark.parametrize("reply", NO_RATINGS, ids=lambda r: r[:30] or "empty")
def test_m04_a_number_somewhere_is_no_score(reply: str) -> None:
    with pytest.raises(ValueError):
        parse_rating(reply)


@given(st.text(max_size=80))
def test_m04_no_text_crashes_the_parsers_or_leaves_the_range(text: str) -> None:
    for parse in (parse_rating, parse_verdict):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert parse is parse_verdict or 0 <= value.score <= 10


@pytest.mark.parametrize(
    "piece", [" ", "\n", "*", "Score: ", "{", "correct:", "correct: yes ", "```", "7 ", "[", '{"a']
)
def test_reading_takes_linear_time(piece: str) -> None:
    text = "Score:" + piece * (90_000 // len(piece)) + "x"
    started = time.monotonic()
    for parse in (parse_rating, parse_verdict):
        with pytest.raises(ValueError):
            parse(text)
    assert time.monotonic() - started < 3.0
