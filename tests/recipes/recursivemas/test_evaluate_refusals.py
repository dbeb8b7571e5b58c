"""What an evaluation refuses before anything loads."""

from __future__ import annotations

import json

import pytest
from held_out import QUESTIONS
from pydantic import ValidationError

from agentrl.errors import ConfigError, DataError
from agentrl.recipes.recursivemas.evaluate import evaluate, held_out_tasks
from agentrl.recipes.registry import VerbOptions


@pytest.mark.parametrize(
    ("own", "fault"),
    [
        ({"controls": ("none", "none")}, "a name stands there twice"),
        ({"text_team": {"max_tokens": 4}}, "has no effect without the control text"),
        ({"controls": "all", "text_team": {"exact": True}}, "has no effect without max_tokens"),
        ({"decodes": 2}, "greedy answers are all the same"),
    ],
)
def test_settings_without_effect_are_refused(make_held_out, own, fault):
    with pytest.raises(ValidationError, match=fault):
        make_held_out(**own)


def test_answers_that_are_too_much_alike_to_shuffle_are_refused_before_anything_loads(make_held_out):
    rows = [(i, q, "same") for i, q, _ in QUESTIONS]
    with pytest.raises(DataError, match="3 of 3 answers are equal"):
        evaluate(make_held_out(controls=("shuffled",), rows=rows), VerbOptions())


def test_untrained_links_are_refused_and_a_benchmark_must_fit_the_form_of_answers(make_held_out, tmp_path):
    with pytest.raises(ConfigError, match="untrained links carry nothing"):
        evaluate(make_held_out(allow_untrained=False), VerbOptions())
    recipe = make_held_out()
    file = tmp_path / "gsm.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": "#### 1"}) + "\n")
    data = recipe.data.model_copy(update={"path": str(file), "format": "gsm8k"})
    with pytest.raises(ConfigError, match=r"have the form boxed, recursivemas\.answer is short"):
        held_out_tasks(recipe.model_copy(update={"data": data}))
    boxed = recipe.model_copy(
        update={"data": data, "recursivemas": recipe.recursivemas.model_copy(update={"answer": "boxed"})}
    )
    assert held_out_tasks(boxed)[0].references == ("1",)


def test_a_training_recipe_is_not_evaluated_on_what_it_trains_on(make_held_out):
    recipe = make_held_out()
    trains = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 3})})
    with pytest.raises(DataError, match=r"data.eval.path: no held-out set"):
        held_out_tasks(trains)
