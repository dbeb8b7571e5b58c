"""What a recipe may say, what a style fills in, and what is refused with the key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from agentrl.recipes.recursivemas.recipe import RecursiveRecipe


def parse(**data):
    return RecursiveRecipe.model_validate_json(json.dumps({"method": "recursivemas", **data}), strict=True)


CUSTOM = {
    "style": "custom",
    "roles": {"a": {"prompt": "{question}"}, "b": {"prompt": "{a} {question}"}},
    "edges": [{"source": "a", "target": "b"}],
    "decoder": "b",
}


def test_a_style_fills_agents_models_and_the_papers_sampling():
    recipe = parse()
    assert tuple(recipe.agents) == ("planner", "critic", "solver")
    assert recipe.policy_models["critic"].name == "meta-llama/Llama-3.2-1B-Instruct"
    assert {m.mode for m in recipe.policy_models.values()} == {"frozen"}
    assert (recipe.decoder.sampling.temperature, recipe.decoder.sampling.top_p) == (0.6, 0.95)
    one = parse(model={"name": "tiny-llama"}, agents={"solver": {"sampling": {"max_tokens": 8}}})
    assert set(one.policy_models) == {"policy"}
    assert one.policy_models["policy"].mode == "frozen"
    assert (one.decoder.sampling.max_tokens, one.decoder.sampling.top_p) == (8, 0.95)


def test_a_model_that_is_to_be_trained_is_refused_where_it_is_named():
    with pytest.raises(ValueError, match=r"model\.mode: RecursiveMAS trains links only"):
        parse(model={"name": "tiny-llama", "mode": "lora"})
    policies = {n: {"name": "tiny-llama", "mode": "full"} for n in ("planner", "critic", "solver")}
    with pytest.raises(ValueError, match=r"policies\.planner\.mode: RecursiveMAS trains links only"):
        parse(policies=policies)


def test_a_user_declares_a_sixth_style():
    recipe = parse(model={"name": "tiny-llama"}, recursivemas=CUSTOM)
    assert recipe.recursivemas.graph.rollouts(2) == 3
    assert tuple(recipe.agents) == ("a", "b")


@pytest.mark.parametrize("field", ["question", "planner"])
def test_a_role_may_be_reworded_and_keeps_the_rest_of_the_style(field):
    text = "Check: {planner} for {question}"
    recipe = parse(recursivemas={"roles": {"critic": {"prompt": text}}})
    assert recipe.recursivemas.prompt_of("critic", 1) == text
    assert "{critic}" in recipe.recursivemas.prompt_of("solver", 1)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"rounds": 0}, "rounds"),
        ({"latent_steps": -1}, "latent_steps"),
        ({"style": "parliament"}, "style"),
        ({"roles": {"critic": {"prompt": "{question}"}}}, "roles.critic.first: the slot {planner} is missing"),
        ({"roles": {"critic": {"prompt": "{planner} {solver}"}}}, "{solver} is no block that critic hears in round 1"),
        ({"roles": {"critic": {"prompt": "{planner} {planner}"}}}, "a slot stands there twice"),
        ({"roles": {"planner": {"prompt": "{solver}"}}}, "roles.planner.first: {solver} is no block"),
        ({"roles": {"judge": {"prompt": "x"}}}, "roles.judge"),
        ({"edges": [{"source": "a", "target": "b"}]}, "edges: has no effect with style: sequential_light"),
        ({**CUSTOM, "decoder": None}, "decoder: is needed with style: custom"),
        ({**CUSTOM, "edges": [{"source": "b", "target": "a"}]}, "nothing leads from agent 'a'"),
        ({"inner_form": "ln"}, "inner_form: ln"),
        ({"official": {"outer": "x", "inner": {"planner": "y"}}}, "official.inner.critic"),
        ({"official": {"outer": "x", "inner": {}}, "links": "y"}, "official: has no effect with links"),
        ({"official": {"outer": "x", "inner": {}}, "match_norm": True}, "no norm matching"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(own, words):
    with pytest.raises(ValidationError) as fault:
        parse(model={"name": "tiny-llama"}, recursivemas=own)
    assert words in str(fault.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"policies": {"planner": {"name": "tiny-llama", "mode": "full"}}}, "agents.critic.policy"),
        ({"model": {"name": "tiny-llama", "mode": "full"}}, "models are frozen"),
        ({"agents": {"judge": {}}}, "judge"),
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm: has no effect"),
        ({"launch": {"ranks": 2}}, "launch.ranks: has no effect"),
        ({"run": {"steps": 1, "eval_temperature": 0.5}}, "run.eval_temperature: has no effect"),
        ({"run": {"steps": 1, "eval_temperature": 0.0}}, "run.eval_temperature: has no effect"),
        ({"run": {"steps": 1, "save_prompt_ids": True}}, "run.save_prompt_ids"),
        ({"engine": {"kind": "scripted", "script": "a:b"}}, "no hidden states"),
    ],
)
def test_agents_models_and_engine_must_fit_the_method(data, words):
    with pytest.raises(ValidationError) as fault:
        parse(**data)
    assert words in str(fault.value)


def test_the_schema_imports_no_torch():
    code = "import sys, agentrl.recipes.recursivemas.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
