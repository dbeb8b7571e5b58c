"""Every action is scored once its tools are done, with all a coach needs, beside the rollout (M-01..M-08, X-01)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from agentrl.config.schema import CoachConfig
from agentrl.errors import ConfigError
from agentrl.launch.devices import GIB, Gpu, Hardware
from agentrl.recipes.mappa import coaching as coaching_module
from agentrl.recipes.mappa.coaching import open_coaching
from agentrl.recipes.mappa.setup import samples_of
from agentrl.scoring.client import CallError, ScoringClient
from agentrl.scoring.coach import LLMCoach
from agentrl.scoring.record import Reply
from agentrl.scoring.rules import artifacts
from agentrl.types import MaskReason, Score

CALL = '<tool_call>{"name": "look", "arguments": {"query": "x"}}</tool_call>'


def team(lab, *turns: int, **sections):
    names = ("first", "second", "third")
    agents = {n: {"tools": ("look",), "max_turns": k} for n, k in zip(names, turns, strict=True)}
    return lab.recipe(agents, **sections)


@pytest.mark.parametrize(("turns", "calls"), [((1, 2, 1), 4), ((4, 4, 4), 12)])
def test_m01_every_action_gets_exactly_one_score(roll, lab, turns, calls):
    tool = lab.tool(lambda _: lab.told("a page"))
    done = roll(team(lab, *turns), dict.fromkeys(("first", "second", "third"), CALL), [tool])
    assert len(done.coach.views) == calls
    assert len(done.only.action_scores) == len(done.only.trajectory.turns) == calls
    assert all(score.value == 5.0 for score in done.only.action_scores)


def test_m02_the_coach_sees_role_input_action_result_and_that_there_is_no_reference(roll, lab):
    agents = {"worker": {"role": "ROLE1", "prompt": "SYSTEM2", "tools": ("look",), "max_turns": 2}}
    tool = lab.tool(lambda _: lab.told("RESULT5"))
    done = roll(lab.recipe(agents), {"worker": [f"ACTION4 {CALL}", "end"]}, [tool])
    first, second = done.coach.views
    coach = LLMCoach(ScoringClient(CoachConfig(model="m", base_url="http://x"), "m", _Canned()))
    shown = "\n".join(part.text for message in coach.messages(first) for part in message.parts)
    for sentinel in ("ROLE1", "SYSTEM2", "six times seven", "ACTION4", "RESULT5", "none given"):
        assert sentinel in shown, sentinel
    assert "ACTION4" in second.observed
    assert "RESULT5" in second.observed
    assert second.feedback is None


def test_m02_a_view_without_a_prompt_is_refused(roll, lab):
    done = roll(lab.recipe({"worker": {}}), {"worker": "x"})
    coach = LLMCoach(ScoringClient(CoachConfig(model="m", base_url="http://x"), "m", _Canned()))
    view = done.coach.views[0]
    with pytest.raises(ConfigError, match="has no observed"):
        coach.messages(type(view)(view.task, view.agent, view.role, " ", view.action, None))


def test_m03_the_coach_is_asked_once_the_tools_are_done(roll, lab):
    tool = lab.tool(lambda _: lab.told("LATE-TOKEN"), wait_s=0.05)
    done = roll(team(lab, 1, 1, 1), dict.fromkeys(("first", "second", "third"), CALL), [tool])
    assert [view.feedback for view in done.coach.views] == ["LATE-TOKEN"] * 3


def test_m05_a_missing_score_masks_its_action_alone(roll, lab):
    coach = lab.coach(lambda view: Score(None, "coach failed: down") if view.agent == "second" else 7.0)
    recipe = team(lab, 1, 1, 1)
    done = roll(recipe, dict.fromkeys(("first", "second", "third"), "done"), coach=coach)
    made = samples_of(recipe, done.collected.scored)
    assert [s.num_trained > 0 for s in made.samples] == [True, False, True]
    assert made.rewards[done.only.trajectory.id] == (0.7, None, 0.7)
    [reason] = {r for r in made.samples[1].reasons if r is not MaskReason.PROMPT}
    assert reason is MaskReason.REWARD_MISSING


def test_m06_an_agnostic_coach_and_every_agent_never_see_the_reference(roll, lab):
    recipe = team(lab, 1, 1, 1)
    done = roll(recipe, dict.fromkeys(("first", "second", "third"), "done"))
    assert all("REFERENCE42" not in repr(view) for view in done.coach.views)
    aware = {"kind": "constant", "value": 5.0, "ground_truth": ("third",)}
    done = roll(team(lab, 1, 1, 1, coach=aware), dict.fromkeys(("first", "second", "third"), "done"))
    assert [view.ground_truth for view in done.coach.views] == [None, None, "REFERENCE42"]
    assert all("REFERENCE42" not in repr(view) for view in done.coach.views[:2])
    assert all("REFERENCE42" not in prompt for agent in recipe.agents for prompt in done.prompts(agent))


class Outcome:
    def __init__(self, value):
        self.value = value

    async def score(self, task, trajectory):
        return Score(self.value)


def test_m07_the_outcome_does_not_enter_the_reward(roll, lab):
    recipe = team(lab, 1, 1, 1)
    rewards = []
    for value in (0.0, 1.0):
        done = roll(recipe, dict.fromkeys(("first", "second", "third"), "done"), reward=Outcome(value))
        assert done.only.outcome.value == value
        rewards.append(list(samples_of(recipe, done.collected.scored).rewards.values()))
    assert rewards[0] == rewards[1]


def test_m27_the_rollout_does_not_wait_for_the_coach_and_calls_run_at_once(roll, lab):
    coach = lab.coach(wait_s=0.1)
    started = time.perf_counter()
    done = roll(team(lab, 1, 1, 1), dict.fromkeys(("first", "second", "third"), "x"), coach=coach, group_size=32)
    took = time.perf_counter() - started
    assert len(coach.views) == 96
    assert done.collected.rollout_s < 0.1 * 96 / 4
    assert took < 0.1 * 96 / 4


class _Canned:
    """A backend that counts calls in flight and answers after a while."""

    def __init__(self, wait_s: float = 0.0, replies=None):
        self.wait_s, self.now, self.most, self.calls = wait_s, 0, 0, 0
        self.replies = replies or ['{"analysis": "", "score": 6}']

    async def complete(self, call):
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.wait_s)
        self.now -= 1
        reply = self.replies[min(self.calls - 1, len(self.replies) - 1)]
        if isinstance(reply, CallError):
            raise reply
        return Reply(reply, 1, 1, "stop")

    async def close(self):
        pass


def test_m27_the_coachs_own_limit_on_calls_in_flight_holds(roll, lab):
    backend = _Canned(0.1)
    config = CoachConfig(model="m", base_url="http://x", max_concurrent=16)
    coach = LLMCoach(ScoringClient(config, "m", backend))
    started = time.perf_counter()
    done = roll(lab.recipe({"one": {}}), {"one": "x"}, coach=coach, group_size=32)
    assert backend.most == 16
    assert time.perf_counter() - started < 2.0
    assert all(one.action_scores[0].value == 6.0 for one in done.collected.scored)


def test_m05_bounded_retries_then_missing_through_a_real_client(roll, lab):
    config = CoachConfig(model="m", base_url="http://x", max_retries=2, backoff_s=0.0)
    down = CallError("down", retry=True)
    backend = _Canned(replies=[down, down, "6"])
    done = roll(lab.recipe({"one": {}}), {"one": "x"}, coach=LLMCoach(ScoringClient(config, "m", backend)))
    assert (backend.calls, done.only.action_scores[0].value) == (3, 6.0)
    backend = _Canned(replies=[down])
    done = roll(lab.recipe({"one": {}}), {"one": "x"}, coach=LLMCoach(ScoringClient(config, "m", backend)))
    assert backend.calls == 3
    assert done.only.action_scores[0].missing
    assert "down" in done.only.action_scores[0].reason


def test_m08_the_ledger_tells_who_left_out_what(roll, lab):
    agents = {
        "engineer": {"must_save": ("X_train.pkl", "X_test.pkl")},
        "modeler": {"must_save": ("model.pkl",), "needs": ("X_train.pkl",)},
        "analyst": {"must_save": ("submission.csv",), "needs": ("X_test.pkl", "model.pkl")},
    }
    coach = lab.coach(lambda view: artifacts(view)[0])
    done = roll(lab.recipe(agents), {"engineer": "x", "modeler": "y", "analyst": "z"}, coach=coach)
    engineer, modeler, analyst = coach.views
    assert engineer.ledger["missing"] == ["X_train.pkl", "X_test.pkl"]
    assert modeler.ledger["missing_upstream"] == {"X_train.pkl": "engineer"}
    assert analyst.ledger["missing_upstream"] == {"X_test.pkl": "engineer", "model.pkl": "modeler"}
    assert [score.value for score in done.only.action_scores] == [3.0, 6.0, 6.0]


def test_x01_hindsight_lowers_the_one_to_blame_and_leaves_the_others(roll, lab):
    def rule(view):
        crashed = "FileNotFoundError: X_test" in str(view.ledger.get("afterwards", ""))
        return 2.0 if crashed and view.agent == "first" else 8.0

    tool = lab.tool(lambda _: lab.told("FileNotFoundError: X_test.pkl"))
    voices = {"first": "saved all", "second": "trained", "third": CALL}
    coach = lab.coach(rule)
    done = roll(team(lab, 1, 1, 1, mappa={"hindsight": True}), voices, [tool], coach=coach)
    assert [score.value for score in done.only.action_scores] == [2.0, 8.0, 8.0]
    assert [score.info["immediate"] for score in done.only.action_scores] == [8.0, 8.0, 8.0]
    assert len(coach.views) == 6
    done = roll(team(lab, 1, 1, 1), voices, [tool], coach=lab.coach(rule))
    assert [score.value for score in done.only.action_scores] == [8.0, 8.0, 8.0]


def test_x03_a_model_of_this_machine_may_be_the_coach(roll, lab, tiny, monkeypatch):
    monkeypatch.setenv("AGENTRL_HOME", str(tiny.parent.parent))
    local = {"kind": "local", "model": "tiny-llama", "max_tokens": 120, "max_chars": 200, "max_retries": 1}
    recipe = lab.recipe({"one": {}}, coach=local)
    view = roll(recipe, {"one": "an action"}).coach.views[0]

    async def ask() -> Score:
        async with open_coaching(recipe) as coaching:
            return await coaching._score(view, lab.QUESTION)

    score = asyncio.run(ask())
    assert score.value is None or 0.0 <= score.value <= 10.0
    assert score.info["calls"] >= 1


@pytest.mark.parametrize(("gpus", "moves"), [(0, ["cpu"]), (1, ["cuda"]), (None, ["cuda"])])
def test_x03_a_local_coach_computes_where_the_run_does(lab, tiny, monkeypatch, gpus, moves):
    monkeypatch.setenv("AGENTRL_HOME", str(tiny.parent.parent))
    box = Hardware(4, 8 * GIB, gpus=tuple(Gpu(i, "X", 80 * GIB, (9, 0)) for i in range(2)), torch_cuda="13.0")
    monkeypatch.setattr(coaching_module, "detect", lambda: box)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, place: moved.append(place) or model)
    recipe = lab.recipe({"one": {}}, coach={"kind": "local", "model": "tiny-llama"}, launch={"gpus": gpus})

    async def opened() -> None:
        async with open_coaching(recipe):
            pass

    asyncio.run(opened())
    assert moved == moves


def test_x02_offsets_per_kind_of_task_apply_to_every_score_of_training_and_to_the_reward(roll, lab):
    coach = {"kind": "constant", "value": 5.0, "stratum": "kind", "offsets": {"sum": -1.5}}
    recipe = lab.recipe({"one": {}}, coach=coach)
    tasks = [replace(lab.QUESTION, id=kind, info={"kind": kind}) for kind in ("sum", "word")]
    done = roll(recipe, {"one": "x"}, tasks=tasks)
    by_kind = {one.trajectory.task.id: one.action_scores[0] for one in done.collected.scored}
    assert (by_kind["sum"].value, by_kind["word"].value) == (3.5, 5.0)
    assert by_kind["sum"].info["uncalibrated"] == 5.0
    made = samples_of(recipe, done.collected.scored)
    assert sorted(rewards[0] for rewards in made.rewards.values()) == [0.35, 0.5]
    hindsight = lab.recipe({"one": {}}, coach=coach, mappa={"hindsight": True})
    assert roll(hindsight, {"one": "x"}, tasks=tasks[:1]).only.action_scores[0].value == 3.5


@pytest.mark.parametrize("section", [{"stratum": "kind"}, {"offsets": {"sum": 1.0}}])
def test_x02_offsets_and_the_key_that_names_the_kind_go_together(lab, section):
    with pytest.raises(ValueError, match="goes with offsets"):
        lab.recipe({"one": {}}, coach={"kind": "constant", "value": 5.0, **section})


def test_a_fault_that_no_retry_mends_ends_the_run_instead_of_hiding(roll, lab):
    def rule(view):
        raise ConfigError("the coach is set up wrongly", "mend it")

    with pytest.raises(ConfigError, match="set up wrongly"):
        roll(lab.recipe({"one": {}}), {"one": "x"}, coach=lab.coach(rule))
