"""Tabular grading (MAPPA M-28 to M-30): joins by id, honest failures, and the official score."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.grading.table_metrics import (
    FALLBACKS,
    auc,
    fair_mean,
    label_metrics,
    trivial_error,
)
from agentrl.grading.table_report import table_report
from agentrl.grading.tabular import (
    TableGrader,
    TableSpec,
    measured,
    normalised_score,
    score_cap,
    score_table,
    skill,
    task_kind,
)
from agentrl.grading.trials import trials_block
from agentrl.types import Score, Task, Trajectory

ANSWERS = "id,y\n" + "".join(f"{i},{i % 2}\n" for i in range(10))
HALF = "id,y\n" + "".join(f"{i},{(i % 2) if i < 8 else 1 - i % 2}\n" for i in range(10))


def _csv(rows: list[tuple[Any, ...]]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def test_m29_shuffled_rows_give_the_same_score() -> None:
    head, *rows = HALF.splitlines(keepends=True)
    shuffled = head + "".join(random.Random(0).sample(rows, len(rows)))
    first = score_table(HALF, ANSWERS, TableSpec())
    assert first.value == 0.8
    assert score_table(shuffled, ANSWERS, TableSpec()) == first
    assert score_table(HALF, head + "".join(reversed(ANSWERS.splitlines(keepends=True)[1:])), TableSpec()) == first


@pytest.mark.parametrize(
    ("submission", "reason"),
    [
        ("".join(HALF.splitlines(keepends=True)[:-1]), "lacks 1 of 10 rows, such as id '9'"),
        (HALF + "10,1\n", "has 1 rows that nobody asked for, such as id '10'"),
        (HALF + "9,1\n", "repeat the id '9'"),
        (HALF.replace("3,1", "3,nan"), "empty or NaN predictions"),
        (HALF.replace("3,1", "3,"), "empty or NaN predictions"),
        (HALF.replace("3,1", "3"), "line 5 of the submission has 1 cells for 2 columns"),
        (HALF.replace("id,y", "row,y"), "no column 'id'; it has ['row', 'y']"),
        (HALF.replace("id,y", "id,id"), "repeat a column"),
        ("id,y\n", "have no rows"),
        ("", "have no rows"),
        ('id,y\n0,"1\n', "cannot be read as CSV"),
    ],
)
def test_m29_a_submission_at_fault_has_failed_with_the_reason(submission: str, reason: str) -> None:
    result = score_table(submission, ANSWERS, TableSpec(baseline=0.5, best=1.0))
    assert not result.ok
    assert result.normalised is None
    assert reason in str(result.reason)


@pytest.mark.parametrize("infinite", ["inf", "1e999", "-inf", "abc"])
def test_a_regression_needs_finite_numbers(infinite: str) -> None:
    answers = _csv([("id", "y"), *((i, i * 1.5) for i in range(20))])
    submission = answers.replace("3,4.5", f"3,{infinite}")
    assert "finite number is needed" in str(score_table(submission, answers, TableSpec()).reason)
    too_large = answers.replace("3,4.5", "3,1e200")
    assert "not finite" in str(score_table(too_large, answers, TableSpec()).reason)


def test_m29_ids_and_columns_are_matched_by_what_they_mean() -> None:
    submission = "\ufeffY,ID\r\n" + "".join(f"{i % 2},{i}.0\r\n" for i in reversed(range(10)))
    assert score_table(submission, ANSWERS, TableSpec()).value == 1.0
    assert score_table(HALF.replace("id,y", "id,prediction"), ANSWERS, TableSpec()).value == 0.8
    two = HALF.replace("id,y", "id,a,b").replace("\n", ",1\n").replace("b,1", "b")
    assert "no column 'y'" in str(score_table(two, ANSWERS, TableSpec()).reason)
    text_ids = "id,y\na-1,3.5\nb-2,4.5\nc-3,5.5\n"
    assert score_table("id,y\nc-3,5.5\na-1,3.5\nb-2,4.5\n", text_ids, TableSpec()).value == 0.0


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["cat", "dog", "bird"] * 5, "classification"),
        (["Insufficient_Weight", "Obesity_Type_I", "Normal"] * 3, "classification"),
        (["0", "1"] * 5, "classification"),
        (["1.5", "2.5"] * 5, "classification"),
        (["1", "2", "3"] * 5, "classification"),
        ([str(i % 11) for i in range(100)], "regression"),
        (["1.5", "2.5", "3.5"] * 5, "regression"),
        (["3", "1", "4", "15", "9", "2", "6"], "regression"),
        (["1000", "1200", "900.5", "30"], "regression"),
    ],
)
def test_m29_string_labels_are_classes(values: list[str], kind: str) -> None:
    assert task_kind([values]) == kind


def test_m29_string_labels_are_scored_by_accuracy() -> None:
    answers = _csv([("id", "kind"), *((i, ["cat", "dog", "bird"][i % 3]) for i in range(9))])
    submission = answers.replace("0,cat", "0,dog").replace("dog", "Dog")
    result = score_table(submission, answers, TableSpec())
    assert result.kind == "classification"
    assert result.metric == "accuracy"
    assert result.value == pytest.approx(8 / 9)


def test_m29_the_official_score() -> None:
    assert normalised_score(0.8, 0.5, 0.9) == pytest.approx(0.75)
    assert normalised_score(0.4, 0.5, 0.9) == 0.0
    assert normalised_score(1.0, 0.5, 0.9) == pytest.approx(1.25)
    assert normalised_score(3.0, 5.0, 1.0) == pytest.approx(0.5)  # an error, which should fall
    assert normalised_score(6.0, 5.0, 1.0) == 0.0
    assert normalised_score(None, 0.5, 0.9) == normalised_score(math.nan, 0.5, 0.9) == 0.0
    with pytest.raises(ValueError, match="differ"):
        normalised_score(0.8, 0.5, 0.5)
    result = score_table(HALF, ANSWERS, TableSpec(baseline=0.5, best=0.9))
    assert result.normalised == pytest.approx(0.75)


def test_probabilities_are_scores_for_auc_and_classes_for_accuracy() -> None:
    probabilities = _csv([("id", "y"), *((i, 0.6 + 0.01 * i if i % 2 else 0.1 + 0.05 * i) for i in range(10))])
    result = score_table(probabilities, ANSWERS, TableSpec(metric="auc"))
    assert result.value == 1.0
    assert result.metrics["accuracy"] == 0.9  # row 8 has 0.5
    assert auc([True, False], [0.5, 0.5]) == 0.5
    assert auc([True, True, False, False], [0.9, 0.4, 0.4, 0.1]) == pytest.approx(0.875)
    assert math.isnan(auc([True], [1.0]))


def test_f1_is_that_of_the_greater_label_or_the_mean_over_classes() -> None:
    assert label_metrics([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0])["f1"] == pytest.approx(0.8)
    three = label_metrics(["a", "b", "c"], ["a", "b", "b"])
    assert three["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    majority = label_metrics([0.0] * 9 + [1.0], [0.0] * 10)
    assert majority["accuracy"] == 0.9
    assert majority["f1"] == 0.0


def test_several_columns_are_averaged_and_one_hot_ones_are_probabilities() -> None:
    answers = _csv([("id", "a", "b"), *((i, i * 1.0, i * 2.5) for i in range(12))])
    submission = _csv([("id", "b", "a"), *((i, i * 2.5 + 2, i * 1.0 + 1) for i in range(12))])
    result = score_table(submission, answers, TableSpec())
    assert result.kind == "regression"
    assert result.value == pytest.approx(1.5)
    hot = _csv([("id", "p", "q", "r"), *((i, int(i % 3 == 0), int(i % 3 == 1), int(i % 3 == 2)) for i in range(9))])
    even = _csv([("id", "p", "q", "r"), *((i, 1 / 3, 1 / 3, 1 / 3) for i in range(9))])
    spec = TableSpec(metric="logloss", baseline=math.log(3), best=0.0)
    assert score_table(even, hot, spec).value == pytest.approx(math.log(3))
    assert score_table(even, hot, spec).normalised == pytest.approx(0.0)
    assert score_table(hot, hot, spec).normalised == pytest.approx(1.0)


def test_regression_metrics_have_their_textbook_values() -> None:
    answers = _csv([("id", "y"), (1, 0.0), (2, 10.5), (3, 20.0)])
    submission = _csv([("id", "y"), (1, 3.0), (2, 10.5), (3, 16.0)])
    metrics = score_table(submission, answers, TableSpec()).metrics
    assert metrics["mae"] == pytest.approx(7 / 3)
    assert metrics["mse"] == pytest.approx(25 / 3)
    assert metrics["rmse"] == pytest.approx(math.sqrt(25 / 3))
    assert metrics["rmse_of_range"] == pytest.approx(math.sqrt(25 / 3) / 20)


def test_m30_fair_means_count_failed_runs_at_their_fallback() -> None:
    fair = fair_mean([0.8, None, 0.6, None], FALLBACKS["accuracy"])
    assert fair.fair == pytest.approx(0.60)
    assert fair.plain == pytest.approx(0.70)
    assert fair.success_rate == 0.5
    assert fair_mean([None, 2.0], [5.0, 7.0]).fair == 3.5
    assert fair_mean([None], 0.0).plain is None
    with pytest.raises(ValueError, match="at least one run"):
        fair_mean([], 0.5)
    with pytest.raises(ValueError):
        fair_mean([None, 1.0], [0.5])


def test_m30_the_fallback_of_an_error_is_that_of_the_mean() -> None:
    rmse, share = trivial_error([0.0, 10.0])
    assert (rmse, share) == (5.0, 0.5)
    assert trivial_error([3.0, 3.0]) == (0.0, 0.0)


def test_m28_trials_are_reported_with_a_standard_error_over_problems() -> None:
    block = trials_block({"a": [1, 1, 0, 0], "b": [1, 1, 1, 1], "c": [0, None, 0, 0], "d": [None, None]})
    assert block["score"] == pytest.approx(0.5)
    assert block["se"] == pytest.approx(math.sqrt(0.25 / 3))
    assert (block["n"], block["trials"], block["missing"]) == (3, 11, 3)
    assert block["items"] == {"a": 0.5, "b": 1.0, "c": 0.0, "d": None}
    assert trials_block({"a": [1.0]})["se"] is None
    assert trials_block({})["score"] is None


def _score(answer: str | None, info: dict[str, Any], status: str = "ok") -> Score:
    task = Task("t", "q", info=info)
    trajectory = Trajectory("t/0", task, 0, (), answer, status, "broke")  # type: ignore[arg-type]
    return asyncio.run(TableGrader().score(task, trajectory))


def test_the_reward_is_the_normalised_score_and_a_failed_submission_a_true_zero(tmp_path: Path) -> None:
    info = {"answers": ANSWERS, "baseline": 0.5, "best": 0.9}
    assert _score(HALF, info).value == pytest.approx(0.75)
    assert _score("id,y\n0,1\n", info).value == 0.0
    assert "lacks 9" in str(_score("id,y\n0,1\n", info).reason)
    assert (_score(None, info).value, _score(None, info).reason) == (0.0, "no answer")
    (tmp_path / "answers.csv").write_text(ANSWERS)
    assert _score(HALF, info | {"answers": None, "answers_file": str(tmp_path / "answers.csv")}).value is not None


def test_m30_a_report_over_runs_counts_failed_ones_at_their_fallback() -> None:
    classes = {"answers": ANSWERS, "baseline": 0.5, "best": 0.9}
    six = HALF.replace("6,0", "6,1").replace("7,1", "7,0")
    runs = [_score(text, classes) for text in (HALF, six, "id,y\n0,1\n", None)]
    report = table_report(runs)
    assert (report["runs"], report["success_rate"], report["missing"]) == (4, 0.5, 0)
    assert report["classification"]["accuracy"] == {"plain": pytest.approx(0.7), "fair": pytest.approx(0.6)}
    assert report["classification"]["success_rate"] == 0.5
    assert report["normalised"] == {"plain": pytest.approx(0.5), "fair": pytest.approx(0.25)}
    assert "regression" not in report

    numbers = "id,y\n" + "".join(f"{i},{i / 4}\n" for i in range(9))
    good = _score(numbers, {"answers": numbers, "baseline": 1.0, "best": 0.1})
    bad = _score("nonsense", {"answers": numbers, "baseline": 1.0, "best": 0.1})
    both = table_report([good, bad, Score(None, "rollout failed: x")])
    assert both["regression"]["rmse_of_range"]["fair"] == pytest.approx(trivial_error([i / 4 for i in range(9)])[1] / 2)
    assert both["regression"]["rmse_of_range"]["plain"] == 0.0
    assert (both["success_rate"], both["missing"]) == (pytest.approx(1 / 3), 1)
    assert table_report([]) == {"runs": 0, "success_rate": None, "missing": 0}


def test_m30_metrics_that_a_task_lacks_are_in_no_mean() -> None:
    three = "id,y\n" + "".join(f"{i},{'abc'[i % 3]}\n" for i in range(9))
    report = table_report([_score(three, {"answers": three, "baseline": 0.3, "best": 1.0})])
    assert set(report["classification"]) == {"runs", "success_rate", "accuracy", "f1"}


def test_a_task_at_fault_is_missing(tmp_path: Path) -> None:
    assert _score(HALF, {"answers": ANSWERS}).missing
    for broken in (
        {"answers": "id,y\n1,x\n2,y\n", "kind": "regression"},
        {"answers": "id,y\n"},
        {"answers_file": str(tmp_path / "none.csv")},
        {"answers": ANSWERS, "metric": "x"},
    ):
        assert _score(HALF, {"baseline": 0.5, "best": 0.9} | broken).missing
    assert _score(HALF, {"answers": ANSWERS}, status="failed") == Score(None, "rollout failed: broke")


CLASSES = _csv([("id", "y"), *((i, "yes" if i % 10 < 3 else "no") for i in range(40))])
NUMBERS = _csv([("id", "y"), *((i, i * i / 7) for i in range(40))])


def _cap(submission: str, answers: str, **spec: Any) -> int:
    gained = skill(score_table(submission, answers, TableSpec(**spec)).value, answers, TableSpec(**spec))
    assert gained is not None
    return score_cap(gained)


def test_x02_mean_and_majority_predictors_are_capped_alike() -> None:
    majority = _csv([("id", "y"), *((i, "no") for i in range(40))])
    mean = _csv([("id", "y"), *((i, sum(j * j / 7 for j in range(40)) / 40) for i in range(40))])
    assert _cap(majority, CLASSES) == _cap(mean, NUMBERS) == 3
    assert _cap(mean, NUMBERS, metric="r2") == _cap(mean, NUMBERS, metric="mae") == 3
    assert _cap(CLASSES, CLASSES) == _cap(NUMBERS, NUMBERS) == 9


def test_x02_half_way_from_the_trivial_predictor_is_capped_alike_too() -> None:
    wrong = {0, 10, 20, 30, 1, 11}  # six of the twelve rare labels: accuracy 0.85, from 0.7 to 1
    half = _csv([("id", "y"), *((i, "yes" if i % 10 < 3 and i not in wrong else "no") for i in range(40))])
    middle = sum(j * j / 7 for j in range(40)) / 40
    near = _csv([("id", "y"), *((i, (i * i / 7 + middle) / 2) for i in range(40))])
    for submission, answers in ((half, CLASSES), (near, NUMBERS)):
        value = score_table(submission, answers, TableSpec()).value
        assert skill(value, answers, TableSpec()) == pytest.approx(0.5)
    assert [score_cap(x) for x in (-1.0, 0.0, 0.05, 0.3, 0.5, 0.9)] == [3, 3, 4, 6, 8, 9]


def test_x02_a_coach_that_may_know_the_answers_is_told_the_cap() -> None:
    majority = _csv([("id", "y"), *((i, "no") for i in range(40))])
    told = measured(majority, {"answers": CLASSES})
    assert told is not None
    assert told.endswith("0.00 of the way from a constant prediction to a perfect one: score at most 3")
    same = _csv([("id", "y"), *((i, "no") for i in range(5))])
    assert skill(1.0, same, TableSpec()) is None, "where a constant is perfect there is no skill to measure"
