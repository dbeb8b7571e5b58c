"""Intervals: known values, fixed draws, and missing scores left out."""

from __future__ import annotations

import random

import pytest

from agentrl.grading.interval import eval_block, paired_rise, wilson


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (1, 1, 0.20654, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_gives_the_published_values(k: int, n: int, low: float, high: float) -> None:
    assert wilson(k, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_refuses_more_successes_than_trials() -> None:
    with pytest.raises(ValueError, match="3 successes in 2"):
        wilson(3, 2)


def test_an_evaluation_holds_the_fields_of_the_summary() -> None:
    block = eval_block({"a": 1.0, "b": 0.0, "c": 1, "d": None})
    assert set(block) == {"score", "n", "k", "low", "high", "items", "missing"}
    assert (block["score"], block["n"], block["k"], block["missing"]) == (pytest.approx(2 / 3), 3, 2, 1)
    assert (block["low"], block["high"]) == pytest.approx(wilson(2, 3))
    assert block["items"] == {"a": 1.0, "b": 0.0, "c": 1, "d": None}


def test_partial_scores_get_an_interval_of_the_mean() -> None:
    block = eval_block({str(i): i / 40 for i in range(41)})
    assert block["k"] == 1
    assert block["score"] == pytest.approx(0.5)
    assert 0.38 < block["low"] < 0.44
    assert 0.56 < block["high"] < 0.62


def test_an_evaluation_without_a_score_is_missing_and_not_zero() -> None:
    for items in ({}, {"a": None}):
        block = eval_block(items)
        assert (block["score"], block["low"], block["high"], block["n"]) == (None, None, None, 0)


def test_the_rise_is_paired_fixed_and_independent_of_order() -> None:
    names = [str(i) for i in range(60)]
    before = {name: float(int(name) % 2) for name in names}
    after = {name: 1.0 if int(name) % 4 == 0 else before[name] for name in names}
    rise = paired_rise(before, after)
    assert rise["value"] == pytest.approx(0.25)
    assert rise["n"] == 60
    assert 0.12 < rise["low"] < 0.2
    assert 0.3 < rise["high"] < 0.4
    random.Random(1).shuffle(names)
    assert paired_rise({n: before[n] for n in names}, {n: after[n] for n in names}) == rise
    assert paired_rise(before, before) == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 60}


def test_a_rise_takes_only_items_that_both_evaluations_scored() -> None:
    rise = paired_rise({"a": 0.0, "b": 1.0, "c": None}, {"a": 1.0, "b": None, "c": 1.0, "d": 1.0})
    assert rise == {"value": 1.0, "low": 1.0, "high": 1.0, "n": 1}
    assert paired_rise({"a": 0.0}, {"b": 1.0}) == {"value": None, "low": None, "high": None, "n": 0}


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(60):
        before = {str(i): float(draw.random() < 0.3) for i in range(80)}
        after = {str(i): float(draw.random() < 0.5) for i in range(80)}
        rise = paired_rise(before, after)
        covered += rise["low"] <= 0.2 <= rise["high"]
    assert covered >= 52
