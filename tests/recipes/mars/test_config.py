"""What a MARS recipe may set: the paper's values by default, and no switch without effect."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.train import train
from agentrl.recipes.registry import VerbOptions


def plain(**sections) -> MarsRecipe:
    return MarsRecipe.model_validate({"method": "mars", "model": {"name": "m"}, **sections})


def fault(mars=None, **sections) -> str:
    with pytest.raises(ValidationError) as caught:
        plain(mars=mars or {}, **sections)
    return str(caught.value)


def test_defaults_are_the_paper_s_setting():
    recipe = plain()
    s2, s1 = recipe.agents[SYSTEM2], recipe.agents[SYSTEM1]
    assert (s2.max_prompt_tokens, s2.max_response_tokens, s2.max_turns) == (3_072, 28_672, 10)
    assert (s1.max_prompt_tokens, s1.max_response_tokens) == (23_552, 8_192)
    assert {a.sampling.temperature for a in (s1, s2)} == {1.0}
    assert {a.sampling.top_p for a in (s1, s2)} == {0.95}
    assert (recipe.rollout.questions_per_step, recipe.rollout.group_size, recipe.run.steps) == (32, 16, 158)
    assert (recipe.optim.lr, recipe.algorithm.kl_coef, recipe.algorithm.clip_eps_low) == (1e-6, 0.0, 0.2)
    assert (recipe.algorithm.clip_eps_high, recipe.optim.weight_decay, recipe.optim.max_grad_norm) == (0.2, 0.01, 1.0)
    mars = recipe.mars
    assert (mars.system1, mars.train, mars.balance, mars.packing) == ("on", "both", "uniform", "ffd")
    assert (mars.normalise, mars.loss_mean, mars.sample_first) == ("per_role", "sequence", False)
    assert (mars.advantage_std, mars.advantage_eps, mars.include_question, mars.bypass_tokens) == (
        *("unbiased", 1e-6),
        *(False, 0),
    )


def test_a_role_keeps_the_paper_s_values_beside_those_that_are_set():
    recipe = plain(agents={SYSTEM2: {"max_turns": 3, "sampling": {"top_k": 5}}})
    s2 = recipe.agents[SYSTEM2]
    assert (s2.max_turns, s2.max_prompt_tokens, s2.sampling.top_k, s2.sampling.top_p) == (3, 3_072, 5, 0.95)
    assert recipe.agents[SYSTEM1].max_prompt_tokens == 23_552


@pytest.mark.parametrize(
    ("mars", "key"),
    [
        ({"system1": "off", "train": "system2"}, "mars.train"),
        ({"system1": "off", "balance": "none"}, "mars.balance"),
        ({"system1": "off", "sample_first": True}, "mars.sample_first"),
        ({"system1": "off", "normalise": "joint"}, "mars.normalise"),
        ({"system1": "off", "packing": "single"}, "mars.packing"),
        ({"system1": "off", "bypass_tokens": 5}, "mars.bypass_tokens"),
        ({"system1": "off", "error_tokens": 9}, "mars.error_tokens"),
        ({"train": "system2", "balance": "none"}, "mars.balance"),
        ({"train": "system2", "sample_first": True}, "mars.sample_first"),
        ({"balance": "none", "sample_first": True}, "mars.sample_first"),
        ({"balance": "weighted", "sample_first": True}, "mars.balance"),
        ({"final_answer": False, "answer_now": "now"}, "mars.answer_now"),
        ({"call_grammar": True, "call_syntax": "tag", "stop_at_tags": False}, "mars.stop_at_tags"),
        ({"max_query_chars": 20}, "mars.max_query_chars"),
        ({"call_grammar": True}, "mars.call_grammar"),
        ({"answer_reserve": 28_672}, "mars.answer_reserve"),
        ({"include_question": True}, "mars.distil_template"),
        ({"distil_template": "{items} {purpose} {question}"}, "mars.distil_template"),
        ({"distil_template": "{items} {items} {purpose}"}, "mars.distil_template"),
        ({"distil_template": "{items}"}, "mars.distil_template"),
        ({"distil_template": "{items} {purpose} {what}"}, "mars.distil_template"),
        ({"distil_template": "{items} {purpose} {"}, "mars.distil_template"),
        ({"item_template": "{header}"}, "mars.item_template"),
    ],
)
def test_switches_that_contradict_or_change_nothing_are_refused_by_name(mars, key):
    assert f"{key}:" in fault(mars)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"agents": {"system3": {}}}, "agents.system3"),
        ({"agents": {SYSTEM1: {"max_turns": 2}}}, "agents.system1.max_turns"),
        ({"agents": {SYSTEM1: {"tools": ["search"]}}}, "agents.system1.tools"),
        ({"agents": {SYSTEM2: {"tools": ["search"]}}}, "agents.system2.tools"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size"),
        ({"reward": "judge"}, "reward: judge"),
        ({"algorithm": {"constrained": "mask"}}, "algorithm.constrained: has no effect without mars.call_grammar"),
        ({"algorithm": {"kl_estimator": "k2"}}, "kl_estimator: has no effect with kl_coef 0"),
        ({"optim": {"min_lr_ratio": 0.5}}, "min_lr_ratio: has no effect with schedule: constant"),
        (
            {
                "model": None,
                "policies": {"a": {"name": "m"}, "b": {"name": "m"}},
                "agents": {SYSTEM2: {"policy": "a"}, SYSTEM1: {"policy": "a"}},
            },
            "policies.b: no agent samples from it",
        ),
        ({"engine": {"kind": "hf"}, "launch": {"address": "10.0.0.1:6379"}}, "launch.address: has no effect"),
    ],
)
def test_sections_that_do_not_fit_are_refused_by_name(sections, words):
    assert words in fault(**sections)


def test_f7_a_group_of_one_is_refused():
    assert "at least 2" in fault(rollout={"group_size": 1})


def test_an_arm_is_the_same_recipe_with_one_switch_turned():
    texts = {"distil_template": "{items} | {purpose}", "item_template": "{text}"}
    assert plain(mars={**texts, "system1": "off"}).mars.system1 == "off"


def test_a_setting_that_has_its_effect_is_taken():
    kl = plain(algorithm={"kl_coef": 0.1, "kl_estimator": "k2"})
    assert kl.algorithm.kl_estimator == "k2"
    assert plain(optim={"schedule": "cosine", "min_lr_ratio": 0.1}).optim.min_lr_ratio == 0.1
    grammar = {"call_grammar": True, "call_syntax": "tag"}
    assert plain(mars=grammar, algorithm={"constrained": "mask"}).algorithm.constrained == "mask"


def keys(recipe: MarsRecipe, level: str = "warning") -> list[str]:
    return [key for found, key, _ in recipe.findings() if found == level]


def test_findings_warn_of_settings_that_cannot_act():
    assert keys(plain()) == []
    assert keys(plain(algorithm={"clip_eps_low": 0.1})) == ["algorithm.clip_eps_low"]
    assert keys(plain(algorithm={"clip_eps_high": 0.28})) == ["algorithm.clip_eps_high"]
    assert keys(plain(optim={"warmup_steps": 3}, run={"steps": 2})) == ["optim.warmup_steps"]
    assert keys(plain(optim={"warmup_steps": 2}, run={"steps": 2})) == []


@pytest.mark.parametrize(
    ("sections", "trained"),
    [
        ({}, (SYSTEM2, SYSTEM1)),
        ({"mars": {"train": "system1"}}, (SYSTEM1,)),
        ({"mars": {"system1": "off"}}, (SYSTEM2,)),
        ({"model": {"name": "m", "mode": "frozen"}}, ()),
        (
            {
                "model": None,
                "policies": {"a": {"name": "m", "mode": "frozen"}, "b": {"name": "m"}},
                "agents": {SYSTEM2: {"policy": "a"}, SYSTEM1: {"policy": "b"}},
                "mars": {"train": "system2"},
            },
            (),
        ),
    ],
)
def test_a_recipe_that_trains_nothing_is_warned_of_and_not_trained(sections, trained):
    recipe = plain(**sections)
    assert recipe.trained_roles == trained
    assert bool(keys(recipe)) == (not trained)
    if not trained:
        with pytest.raises(ConfigError, match="nothing is trained"):
            train(recipe, VerbOptions())


def test_a_resolved_recipe_loads_again():
    once = plain(mars={"balance": "none"})
    assert MarsRecipe.model_validate(once.model_dump()) == once
