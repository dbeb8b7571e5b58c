"""What a reader sees of a summary."""

from __future__ import annotations

import pytest

from agentrl.cli.summary import show_summary
from agentrl.grading.interval import eval_block


def test_a_score_is_k_of_n_only_where_every_answer_is_right_or_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    show_summary({"eval_before": eval_block({"a": 1.0, "b": 0.0}), "eval_after": eval_block({"a": 7.5, "b": 1.0})})
    before, after = capsys.readouterr().out.splitlines()
    assert before.startswith("held-out before: 0.500 (1/2, 95% interval ")
    assert after.startswith("held-out after: 4.250 (n 2, 95% interval ")


def test_partial_marks_are_not_counted_as_wrong_ones(capsys: pytest.CaptureFixture[str]) -> None:
    show_summary({"eval": eval_block({"a": 0.25, "b": 0.75})})
    assert "0.500 (n 2," in capsys.readouterr().out
