"""The channel cut and crossed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.recipes.recursivemas.controls import (
    answers_of,
    crossed_batches,
    partners,
    shuffled,
    single_prompts,
    zeroed,
)
from agentrl.recipes.recursivemas.recursion import run_rounds, sender, thinker
from agentrl.recipes.recursivemas.setup import load_system
from agentrl.types import Embeddings, Task

TASKS = [Task("a", "How many apples are left?"), Task("b", "What is the capital?"), Task("c", "Why is it there?")]


def _prompts(recipe, loaded, send):
    return run_rounds(loaded.system, recipe.recursivemas, TASKS, thinker(4), send).prompts


def _blocks(recipe, loaded, send):
    return [next(s.handle for s in p.segments if isinstance(s, Embeddings)) for p in _prompts(recipe, loaded, send)]


def test_t25_zero_blocks_hold_nothing_and_keep_their_place(make_system):
    recipe, loaded = make_system("distillation", rounds=1)
    plain, zero = (_blocks(recipe, loaded, s) for s in (sender(loaded.system), zeroed(sender(loaded.system))))
    assert all(not z.any() and z.shape == p.shape for z, p in zip(zero, plain, strict=True))
    assert all(p.any() for p in plain)


@pytest.mark.parametrize("style", ["distillation", "sequential_light"])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2)])
def test_t25_shuffled_blocks_come_from_another_question_over_any_number_of_edges(make_system, style, rounds, order):
    recipe, loaded = make_system(style, rounds=rounds)
    plain = sender(loaded.system)
    own = _blocks(recipe, loaded, plain)
    crossed = _blocks(recipe, loaded, shuffled(plain, order, loaded.system.graph.decoder, rounds))
    assert all(torch.equal(crossed[b], own[source]) for b, source in enumerate(order))


def test_t25_shuffled_feedback_that_a_decoder_hears_is_crossed_too(make_recipe):
    roles = {"a": {"first": "{question}", "prompt": "{question} {b}"}, "b": {"first": "{a}", "prompt": "{a} {c}"}}
    roles["c"] = {"prompt": "{question}"}
    edges = [{"source": "a", "target": "b"}, {"source": "c", "target": "b", "feedback": True}]
    edges += [{"source": "b", "target": "a", "feedback": True}]
    models = dict.fromkeys(roles, "tiny-llama")
    recipe = make_recipe("custom", models, roles=roles, edges=edges, decoder="b")
    loaded = load_system(recipe)
    plain, order = sender(loaded.system), (1, 2, 0)
    heard = [
        [[s.handle for s in p.segments if isinstance(s, Embeddings)] for p in _prompts(recipe, loaded, send)]
        for send in (plain, shuffled(plain, order, "b", 2))
    ]
    for b, source in enumerate(order):
        assert len(heard[1][b]) == 2
        assert all(torch.equal(x, y) for x, y in zip(heard[1][b], heard[0][source], strict=True))


@given(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=40), st.integers(0, 5))
def test_t25_nobody_hears_of_a_question_with_an_equal_answer(answers, seed):
    if 2 * max(answers.count(a) for a in answers) > len(answers):
        with pytest.raises(DataError, match="answers are equal"):
            partners(answers, seed)
        return
    groups = partners(answers, seed)
    assert sorted(index for group in groups for index in group) == list(range(len(answers)))
    assert all(len({answers[index] for index in group}) == len(group) >= 2 for group in groups)
    assert groups == partners(answers, seed)


@given(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=40), st.integers(0, 5), st.integers(1, 9))
def test_t25_batches_are_crossed_among_themselves_and_hold_every_question_once(answers, seed, size):
    if 2 * max(answers.count(a) for a in answers) > len(answers):
        return
    tasks = [Task(str(i), "?", (answer,)) for i, answer in enumerate(answers)]
    batches = crossed_batches(tasks, size, seed)
    assert sorted(int(t.id) for b in batches for t in b.tasks) == list(range(len(tasks)))
    for batch in batches:
        assert len(batch.tasks) <= max(size, 3)
        assert sorted(batch.order) == list(range(len(batch.tasks)))
        heard = [batch.tasks[i].references for i in batch.order]
        assert all(own.references != other for own, other in zip(batch.tasks, heard, strict=True))


@given(
    st.lists(st.sets(st.sampled_from("abcdefghijkl"), max_size=3), min_size=2, max_size=20),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_t25_nobody_hears_of_a_question_with_any_reference_of_its_own(answers, seed, rng):
    """In whatever order the references stand."""
    tasks = [Task(str(i), "?", tuple(rng.sample(sorted(own), len(own)))) for i, own in enumerate(answers)]
    try:
        batches = crossed_batches(tasks, 4, seed)
    except DataError:
        names = answers_of(tasks)
        assert 2 * max(map(names.count, names)) > len(names)
        return
    for batch in batches:
        for own, other in zip(batch.tasks, batch.order, strict=True):
            assert own.id != batch.tasks[other].id
            assert not set(own.references) & set(batch.tasks[other].references)


def test_t25_answers_are_one_where_any_reference_is_shared():
    said = [("10", "ten"), ("ten",), ("X", "10"), ("two",), (), ("2", "two"), ("X",)]
    tasks = [Task(str(i), "?", references) for i, references in enumerate(said)]
    assert answers_of(tasks) == ["10", "10", "10", "2", "task 4", "2", "10"]
    # a set where every question has one reference is crossed by that
    assert answers_of(tasks[3:4] + tasks[6:]) == ["two", "X"]


def test_t25_a_question_without_a_reference_may_hear_of_any_other():
    (batch,) = crossed_batches([Task("a", "?"), Task("b", "?")], 8, 0)
    assert set(batch.order) == {0, 1}
    assert batch.order[0] == 1


def test_t25_a_single_agent_reads_the_question_alone(make_system):
    recipe, loaded = make_system()
    config = recipe.recursivemas
    prompt = single_prompts(loaded.system, config, TASKS)[0]
    text = loaded.system.agents["solver"].chat.format.decode(prompt.ids)
    assert TASKS[0].question + "\n\n" + config.instruction in text
    assert "solver" not in text


def test_t25_a_single_agent_reads_the_decoders_own_fields_and_none_that_only_others_read(make_recipe, make_system):
    roles = {
        "planner": {"prompt": "{question} {task.secret} {solver}", "first": "{question} {task.secret}"},
        "critic": {"prompt": "{question} {planner}"},
        "solver": {"prompt": "{question} {task.context} {task.context} {critic} {instruction}"},
    }
    _, loaded = make_system()
    config = make_recipe(roles=roles).recursivemas
    task = Task("a", "How many apples?", info={"secret": "seventeen", "context": "a basket of twelve"})
    text = loaded.system.agents["solver"].chat.format.decode(single_prompts(loaded.system, config, [task])[0].ids)
    assert text.count("a basket of twelve") == 1
    assert task.question in text
    assert config.instruction in text
    assert "seventeen" not in text
