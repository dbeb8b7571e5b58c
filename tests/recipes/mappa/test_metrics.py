"""Behaviour and scores per agent (M-31), and the outcome beside them."""

from __future__ import annotations

import pytest

from agentrl.recipes.mappa.metrics import coach_metrics, over_batches
from agentrl.types import Score
from agentrl.update.step import UpdateResult

CALL = '<tool_call>{"name": "look", "arguments": {"query": "x"}}</tool_call>'


def test_m31_three_of_four_actions_with_a_call_are_a_rate_of_three_quarters(roll, lab):
    recipe = lab.recipe({"worker": {"tools": ("look",), "max_turns": 4}, "idle": {}}, reward="exact_match")
    values = iter((8.0, 4.0, 6.0, None, 10.0))
    coach = lab.coach(lambda _: Score(next(values), "why"))
    done = roll(recipe, {"worker": [CALL, CALL, CALL, "done"], "idle": "x"}, coach=coach)
    found = coach_metrics(recipe, done.collected.scored)
    assert found["mappa/worker/tool_rate"] == 0.75
    assert (found["mappa/worker/actions"], found["mappa/idle/actions"]) == (4, 1)
    assert found["mappa/worker/coach_mean"] == pytest.approx(6.0)
    assert found["mappa/worker/coach_std"] == pytest.approx((8 / 3) ** 0.5)
    assert (found["mappa/worker/coach_missing"], found["mappa/idle/coach_missing"]) == (1, 0)
    assert found["reward/mean"] == pytest.approx(0.7)
    assert found["reward/missing"] == 1
    assert found["outcome/missing"] == 1
    lengths = [len(t.action.completion.ids) for t in done.only.trajectory.turns[:4]]
    assert found["mappa/worker/response_tokens"] == sum(lengths) / 4
    assert found["mappa/worker/truncated"] == 0.0


def test_a_refused_call_is_no_call(roll, lab):
    recipe = lab.recipe({"worker": {"tools": ("look",), "max_turns": 2}})
    done = roll(recipe, {"worker": ["<tool_call>{</tool_call>", "done"]})
    assert coach_metrics(recipe, done.collected.scored)["mappa/worker/tool_rate"] == 0.0


def test_the_steps_of_a_batch_count_once_and_the_engines_gap_is_the_first_ones():
    first = UpdateResult({"loss": 1.0, "tokens/trained": 3, "kl/mismatch": 0.0, "grad_norm": None}, None, ())
    second = UpdateResult({"loss": 3.0, "tokens/trained": 5, "kl/mismatch": 9.0, "grad_norm": 2.0}, None, ())
    merged = over_batches([first, second])
    assert merged == {"loss": 2.0, "tokens/trained": 8, "kl/mismatch": 0.0, "grad_norm": 2.0}
