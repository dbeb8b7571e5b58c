"""Teams declared in YAML (MAPPA X-05), and what a recipe refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.findings import findings
from agentrl.recipes.mappa.team import TeamError, plan_team

CHAIN = """
method: mappa
policies:
  solver: {name: tiny-llama}
  executor: {name: tiny-llama}
  verifier: {name: tiny-qwen3}
agents:
  solver: {policy: solver, role: drafts a solution}
  executor: {policy: executor, role: checks it with Python, tools: [python], max_turns: 2}
  verifier:
    policy: verifier
    role: gives the answer
    receives: [{agent: executor, what: both}]
tools: {python: {}}
coach: {kind: rules, rules: evidence}
run: {steps: 1}
"""


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _recipe(**changes: Any) -> MappaRecipe:
    return MappaRecipe.model_validate(_tuples(yaml.safe_load(CHAIN) | changes))


def _agents(**changes: Any) -> dict[str, Any]:
    return yaml.safe_load(CHAIN)["agents"] | changes


def test_x05_a_chain_is_the_order_of_the_list() -> None:
    recipe = _recipe()
    assert [s.agents for s in recipe.team.stages] == [("solver",), ("executor",), ("verifier",)]
    assert recipe.received_names("executor") == ("solver",)
    assert recipe.received_names("solver") == ()
    assert recipe.answers == "verifier"
    assert recipe.mappa.kl_coef == 0.01
    assert _recipe(optim={"lr": 1e-5}).optim.betas == (0.9, 0.95)
    assert recipe.agents["solver"].sampling.max_tokens == 4096
    assert not recipe.group_relative


def test_x05_a_fourth_agent_is_configuration_only() -> None:
    recipe = _recipe(agents=_agents(critic={"policy": "solver", "role": "criticises"}))
    assert [s.agents for s in recipe.team.stages][-1] == ("critic",)
    assert recipe.answers == "critic"
    assert recipe.normalisation_groups() == ("solver", "executor", "verifier")
    by_agent = _recipe(
        agents=_agents(critic={"policy": "solver", "role": "criticises"}), mappa={"normalise_over": "agent"}
    )
    assert by_agent.normalisation_groups() == ("solver", "executor", "verifier", "critic")


def test_x05_a_graph_fans_out_and_in() -> None:
    team = plan_team({"planner": None, "left": ("planner",), "right": ("planner",), "joiner": ("left", "right")})
    assert [s.agents for s in team.stages] == [("planner",), ("left", "right"), ("joiner",)]
    assert team.before()["joiner"] == {"planner", "left", "right"}
    assert team.before()["right"] == {"planner"}
    assert plan_team({"a": None, "b": ()}).stages[0].agents == ("a", "b")


def test_x05_a_loop_has_a_limit_and_lets_later_agents_be_seen_by_earlier_ones() -> None:
    team = plan_team({"plan": None, "write": None, "check": None, "tell": None}, [(("write", "check"), 3, "GOOD")])
    loop = team.loop_at(1)
    assert loop is not None
    assert (loop.first, loop.last, loop.max_rounds, loop.until) == (1, 2, 3, "GOOD")
    assert team.before()["write"] == {"plan", "write", "check"}
    assert team.before()["tell"] == {"plan", "write", "check"}
    assert team.loop_at(0) is None


@pytest.mark.parametrize(
    ("after", "loops", "fault"),
    [
        ({}, [], "at least one agent"),
        ({"a": ("b",), "b": ("a",)}, [], "a cycle needs a limit"),
        ({"a": ("a",)}, [], "a cycle needs a limit"),
        ({"a": ("nobody",)}, [], "agents.a.after: there is no agent 'nobody'"),
        ({"a": None, "b": None}, [(("c",), 2, None)], "loops[0].agents: there is no agent 'c'"),
        ({"a": None, "b": None, "c": None}, [(("a", "c"), 2, None)], "'b' acts in that stretch too"),
        ({"a": None, "b": None}, [(("a",), 2, None), (("a", "b"), 2, None)], "overlap"),
        ({"a": (), "b": ()}, [(("a", "b"), 2, "x")], "several agents at once"),
    ],
)
def test_what_is_no_team_is_refused_with_the_key(after: Any, loops: Any, fault: str) -> None:
    with pytest.raises(TeamError, match=re.escape(fault)):
        plan_team(after, loops)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tools": {}}, "agents.executor.tools: 'python' is not set up under tools (none)"),
        ({"agents": _agents(solver={"policy": "nobody", "role": "r"})}, "agents.solver.policy"),
        ({"agents": _agents(solver={"policy": "solver", "role": "r", "after": ["verifier"]})}, "a cycle needs a limit"),
        (
            {"agents": _agents(solver={"policy": "solver", "role": "r", "receives": [{"agent": "verifier"}]})},
            "agents.solver.receives: 'verifier' never acts before solver",
        ),
        (
            {"agents": _agents(verifier={"policy": "verifier", "role": "r", "needs": ["x.csv"]})},
            "agents.verifier.needs: no agent before verifier must save 'x.csv'",
        ),
        (
            {"agents": _agents(solver={"policy": "solver", "role": "r", "template": "{{task}}"})},
            "agents.solver.template: there is no variable {{task}}; available: {{question}}",
        ),
        (
            {"agents": _agents(executor={"policy": "executor", "role": "r", "template": "{{question}}"})},
            "agents.executor.template: shows nothing of solver",
        ),
        ({"mappa": {"answer_from": "nobody"}}, "mappa.answer_from: there is no agent 'nobody'"),
        (
            {"agents": _agents(other={"policy": "solver", "role": "r", "after": ["executor"]})},
            "mappa.answer_from: verifier, other all end the team",
        ),
        (
            {"coach": {"kind": "rules", "rules": "evidence", "ground_truth": ["nobody"]}},
            "coach.ground_truth: there is no agent 'nobody'",
        ),
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm.kl_coef: MAPPA's KL stands in the reward"),
        ({"mappa": {"gamma": 0.9}}, "mappa.gamma: has no effect"),
        ({"mappa": {"credit": "outcome"}}, "reward: is needed"),
        ({"mappa": {"outcome_weight": 0.3}}, "reward: is needed"),
        ({"mappa": {"process_weight": 0.0}}, "no reward at all"),
        ({"mappa": {"credit": "grpo", "normalise_over": "agent"}, "reward": "f1"}, "mappa.normalise_over: has no"),
        ({"mappa": {"credit": "outcome", "outcome_weight": 0.5}, "reward": "f1"}, "mappa.outcome_weight: has no"),
        ({"mappa": {"credit": "grpo"}, "reward": "f1", "rollout": {"group_size": 1}}, "rollout.group_size"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(fault)):
        _recipe(**changes)


def test_one_sample_per_prompt_is_enough_and_the_coach_is_an_endpoint_of_the_recipe() -> None:
    coach = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "api_key_env": "K"}
    recipe = _recipe(rollout={"group_size": 1}, coach=coach)
    assert [tuple(e) for e in recipe.endpoints()] == [("coach", "http://127.0.0.1:1/v1", "K")]
    assert _recipe().endpoints() == ()
    assert _recipe(coach=coach | {"replay": "r.jsonl"}).endpoints() == ()


def test_policies_may_be_shared_or_frozen() -> None:
    shared = _recipe(
        policies={"one": {"name": "tiny-llama"}, "partner": {"name": "tiny-llama", "mode": "frozen"}},
        agents=_agents(
            solver={"policy": "one", "role": "r"},
            executor={"policy": "one", "role": "r"},
            verifier={"policy": "partner", "role": "r"},
        ),
    )
    assert shared.normalisation_groups() == ("one", "partner")


def test_check_tells_of_a_coach_that_is_asked_for_nothing() -> None:
    paid = {"kind": "endpoint", "model": "gpt", "base_url": "http://127.0.0.1:9/v1"}

    def warned(**changes: Any) -> list[str]:
        return [text for level, key, text in findings(_recipe(**changes)) if (level, key) == ("warning", "coach")]

    [text] = warned(coach=paid, reward="math", mappa={"credit": "outcome"})
    assert "mappa.credit: outcome takes nothing from its scores" in text
    assert warned(coach=paid) == []
    assert warned(reward="math", mappa={"credit": "outcome"}) == []
