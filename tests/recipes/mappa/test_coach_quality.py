"""What is measured of a coach, against values worked out by hand (X-02 and the measures of coach-eval)."""

from __future__ import annotations

import math

import pytest

from agentrl.recipes.mappa.actions.store import Label, RecordedAction
from agentrl.recipes.mappa.coach_quality import Scored, agreement, auc, quality, spearman
from agentrl.scoring.calibration import calibrated
from agentrl.types import Score

KINDS = ("home", "food", "sum")


def _action(trajectory: int, place: int) -> RecordedAction:
    kind = KINDS[trajectory % len(KINDS)]
    name, agent = f"t{trajectory}", ("first", "second")[place]
    return RecordedAction(
        f"{name}-{place}", name, "test", kind, name, "q", "r", {"relation": kind}, agent, "role", "saw", "did", None
    )


ACTIONS = [_action(t, place) for t in range(12) for place in (0, 1)]
LABELS = {a.id: Label(a.id, a.agent != "second", "empty" if a.agent == "second" else None, "second") for a in ACTIONS}


def _scored(score_of, repeats=1, attacked=None) -> Scored:
    made = tuple(
        tuple(Score(score_of(a), info={"calls": 1, "input_tokens": 3}) for a in ACTIONS) for _ in range(repeats)
    )
    return Scored(made, attacked or {}, 1.5)


def _truth(action: RecordedAction) -> float:
    return 8.0 if LABELS[action.id].right else 2.0


def test_the_area_under_the_curve_counts_pairs_and_ties_as_half():
    assert auc([3, 4], [1, 2]) == 1.0
    assert auc([1, 3], [2, 2]) == 0.5
    assert auc([2, 5], [2, 1]) == (0.5 + 1 + 1 + 1) / 4
    assert auc([], [1]) is None


def test_a_coach_that_knows_separates_and_blames_perfectly_and_a_blind_one_does_neither():
    sees = quality(ACTIONS, LABELS, _scored(_truth))
    assert (sees["auc"]["value"], sees["auc"]["low"], sees["auc"]["high"]) == (1.0, 1.0, 1.0)
    assert (sees["auc"]["right"], sees["auc"]["wrong"]) == (12, 12)
    assert (sees["mean_right"], sees["mean_wrong"]) == (8.0, 2.0)
    assert (sees["blame"]["value"], sees["blame"]["n"], sees["blame"]["chance"]) == (1.0, 12, 0.5)
    blind = quality(ACTIONS, LABELS, _scored(lambda a: 5.0))
    assert blind["auc"]["value"] == blind["blame"]["value"] == 0.5
    turned = quality(ACTIONS, LABELS, _scored(lambda a: 10 - _truth(a)))
    assert turned["auc"]["value"] == turned["blame"]["value"] == 0.0


def test_an_interval_of_a_fair_coach_holds_its_value_and_has_width():
    noisy = quality(ACTIONS, LABELS, _scored(lambda a: _truth(a) if int(a.trajectory[1:]) % 4 else 10 - _truth(a)))
    assert noisy["auc"]["low"] < noisy["auc"]["value"] < noisy["auc"]["high"] <= 1.0
    assert noisy["blame"]["value"] == 0.75


def test_missing_scores_are_counted_with_their_reasons_and_never_a_number():
    reason = "coach failed: unreadable reply: there is no score in the reply"
    scores = [Score(_truth(a)) if a.agent == "first" else Score(None, reason) for a in ACTIONS]
    scores[1] = Score(None, "coach failed: HTTP 500")
    block = quality(ACTIONS, LABELS, Scored((tuple(scores),), {}, 0.0))
    assert block["missing"] == {
        "share": 0.5,
        "unreadable": 11 / 24,
        "n": 12,
        "of": 24,
        "reasons": {reason: 11, "coach failed: HTTP 500": 1},
    }
    assert block["auc"]["value"] is None
    assert block["mean_right"] == 8.0
    assert block["mean_wrong"] is None
    assert block["blame"]["value"] == 0.0, "a culprit without a score is not found"


def test_agreement_between_repeats_is_in_points_and_in_ranks():
    one, two = [Score(float(x)) for x in (1, 2, 3)], [Score(float(x)) for x in (2, 3, 6)]
    assert agreement([one, two]) == {"difference": pytest.approx(5 / 3), "rank": 1.0, "equal": 0.0, "repeats": 2}
    assert agreement([one, one])["equal"] == 1.0
    assert agreement([one, list(reversed(one))])["rank"] == -1.0
    assert agreement([one]) == {"difference": None, "rank": None, "equal": None, "repeats": 1}
    assert spearman([1, 2, 2, 4], [10, 20, 20, 40]) == pytest.approx(1.0)
    assert spearman([1, 1], [1, 2]) is None
    gone = [Score(None), Score(2.0), Score(3.0)]
    assert agreement([one, gone])["difference"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_x02_a_bias_of_one_point_on_one_kind_of_task_is_found_within_a_tenth(kind):
    block = quality(ACTIONS, LABELS, _scored(lambda a: _truth(a) + (a.stratum == kind)))
    assert block["strata"][kind]["bias"] == pytest.approx(1.0, abs=0.1)
    assert block["bias_max"] == pytest.approx(1.0, abs=0.1)
    even = quality(ACTIONS, LABELS, _scored(_truth))
    assert all(abs(s["bias"]) < 1e-9 for s in even["strata"].values())


def test_x02_bias_is_not_fooled_by_kinds_with_more_faults_than_others():
    labels = {
        a.id: LABELS[a.id] if a.stratum != "home" else Label(a.id, a.trajectory != "t0", None, None) for a in ACTIONS
    }
    block = quality(ACTIONS, labels, _scored(lambda a: 8.0 if labels[a.id].right else 2.0))
    assert abs(block["strata"]["home"]["bias"]) < 1e-9


def test_x02_after_calibration_the_means_of_the_kinds_differ_by_less_than_a_twentieth():
    shift = {"home": 1.0, "food": -0.7, "sum": 0.2}
    biased = _scored(lambda a: _truth(a) + shift[a.stratum])
    offsets = {kind: s["offset"] for kind, s in quality(ACTIONS, LABELS, biased)["strata"].items()}
    even = Scored(
        tuple(
            tuple(calibrated(s, offsets, a.stratum) for a, s in zip(ACTIONS, r, strict=True)) for r in biased.repeats
        ),
        {},
        0.0,
    )
    means = [s["mean"] for s in quality(ACTIONS, LABELS, even)["strata"].values()]
    assert max(means) - min(means) < 0.05
    before = [s["mean"] for s in quality(ACTIONS, LABELS, biased)["strata"].values()]
    assert max(before) - min(before) > 1.6


def test_calibration_keeps_within_the_scale_and_leaves_missing_scores_missing():
    offsets = {"home": 4.0}
    assert calibrated(Score(8.0), offsets, "home") == Score(10.0, info={"uncalibrated": 8.0})
    assert calibrated(Score(1.0), {"home": -4.0}, "home").value == 0.0
    assert calibrated(Score(None, "down"), offsets, "home") == Score(None, "down")
    assert calibrated(Score(3.0), offsets, "food") == Score(3.0)


def test_a_plea_is_measured_by_what_it_changes():
    attacked = {ACTIONS[0].id: Score(10.0), ACTIONS[1].id: Score(2.0), ACTIONS[3].id: Score(None)}
    block = quality(ACTIONS, LABELS, _scored(_truth, attacked=attacked))["injection"]
    assert (block["change"], block["raised"], block["n"], block["missing"]) == (1.0, 0.5, 2, 1)


def test_cost_is_of_everything_that_was_asked():
    attacked = {ACTIONS[0].id: Score(10.0, info={"calls": 2, "output_tokens": 5, "cost_usd": 0.25})}
    block = quality(ACTIONS, LABELS, _scored(_truth, repeats=2, attacked=attacked))["cost"]
    assert (block["calls"], block["input_tokens"], block["output_tokens"]) == (50, 144, 5)
    assert block["cost_usd"] == 0.25
    assert math.isclose(block["seconds"], 1.5)
