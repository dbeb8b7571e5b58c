"""Hops: what each hearing agent would say of what it heard, trained beside the answer."""

from __future__ import annotations

import pytest

from agentrl.recipes.recursivemas.losses import outer_loss, sender_with_grad
from agentrl.recipes.recursivemas.recursion import prompts_of, thinker
from agentrl.rollout.latent_answer import text_logprobs, text_loss, text_states
from agentrl.types import Task

QUESTIONS = [Task("0", "How many apples are left?"), Task("1", "What is the capital of the north?")]
ANSWERS = [(11, 12, 13), (14, 15)]
SAID = {"planner": [(20, 21, 22), (23,)], "critic": [(30, 31), (32, 33, 34)]}


@pytest.fixture
def ring(make_system):
    """(config of a round number, system whose outer links take gradients)."""

    def make(rounds):
        recipe, loaded = make_system(rounds=rounds)
        system = loaded.system
        for link in system.outer.values():
            link.requires_grad_(True).zero_grad()
        made.append(system)
        return recipe.recursivemas, system

    made = []
    yield make
    for system in made:  # other tests share it
        for link in system.outer.values():
            link.requires_grad_(False).zero_grad()


def _touched(system):
    return {
        e.name
        for e, link in system.outer.items()
        if any(p.grad is not None and p.grad.any() for p in link.parameters())
    }


def test_a_hop_is_the_cross_entropy_of_the_agents_own_text_after_its_prompt(ring):
    config, system = ring(1)
    out = outer_loss(system, config, QUESTIONS, ANSWERS, hops=SAID)
    assert set(out.hops) == {"critic"}  # the planner hears nobody in round 1, the solver's text is the answer
    think, send = thinker(config.latent_steps), sender_with_grad(system)
    planner, critic = system.agents["planner"], system.agents["critic"]
    states = think(planner, prompts_of(system, config, "planner", 1, QUESTIONS, {})).states_BmD
    edge = next(e for e in system.outer if e.name == "planner-critic")
    prompts = prompts_of(system, config, "critic", 1, QUESTIONS, {edge: send(edge, 1, states)})
    heard = text_states(critic.backbone, prompts, SAID["critic"])
    expected = text_loss(text_logprobs(critic.backbone, heard), heard)
    assert out.hops["critic"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_hop_trains_the_links_before_it_and_none_behind(ring):
    config, system = ring(1)
    outer_loss(system, config, QUESTIONS, ANSWERS, hops=SAID).hops["critic"].backward()
    assert _touched(system) == {"planner-critic"}


def test_agents_that_hear_feedback_say_their_text_too_and_rounds_are_averaged(ring):
    config, system = ring(3)
    out = outer_loss(system, config, QUESTIONS, ANSWERS, hops=SAID)
    assert set(out.hops) == {"planner", "critic"}
    out.hops["planner"].backward()
    assert _touched(system) == {"planner-critic", "critic-solver", "solver-planner"}


def test_hops_leave_the_answers_loss_as_it_is(ring):
    config, system = ring(2)
    plain = outer_loss(system, config, QUESTIONS, ANSWERS)
    assert plain.hops == {}
    beside = outer_loss(system, config, QUESTIONS, ANSWERS, hops=SAID)
    assert beside.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"hop_steps": 3, "form": "teacher_forced", "targets": {"planner": "answer"}}, "hop_steps: with form"),
        ({"hop_steps": 3, "stage": "inner"}, "hop_steps: has no effect with stage: inner"),
    ],
)
def test_hops_without_effect_are_refused(make_recipe, own, problem):
    with pytest.raises(ValueError, match=problem):
        make_recipe(train=own)


def test_hops_where_only_the_decoder_hears_are_refused(make_recipe):
    with pytest.raises(ValueError, match=r"train\.hop_steps: has no effect"):
        make_recipe("distillation", rounds=1, train={"hop_steps": 3})
    with pytest.raises(ValueError, match=r"train\.hop_steps: has no effect"):
        make_recipe("distillation", rounds=2, train={"hop_steps": 3, "one_round_steps": 3})
    make_recipe("distillation", rounds=2, train={"hop_steps": 4, "one_round_steps": 3})


def test_a_text_that_no_hop_is_trained_on_is_refused(make_recipe):
    own = {"targets": {"critic": "answer", "planner": "answer"}}
    with pytest.raises(ValueError, match=r"targets\.planner: has no effect: no hop is trained"):
        make_recipe(train={"hop_steps": 3, "one_round_steps": 3, **own})


def test_an_agent_that_hears_feedback_may_be_given_a_text(make_recipe):
    make_recipe(train={"hop_steps": 4, "one_round_steps": 3, "targets": {"critic": "answer", "planner": "answer"}})
