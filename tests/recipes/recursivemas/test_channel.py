"""The channel task: only the sender's prompt tells, held-out wordings are new, and slots may hold known texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config.load import load
from agentrl.data import load_tasks, overlap
from agentrl.data.channel import CODE_WORDS, code_words, notes, numbers
from agentrl.recipes.recursivemas.held_out import inner_prompts
from agentrl.recipes.recursivemas.prompts import user_parts
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import load_system
from agentrl.recipes.recursivemas.texts import read_texts
from agentrl.recipes.registry import schema_for

RECIPES = Path(__file__).parents[3] / "recipes"
SETS = {"channel": code_words, "channel-numbers": numbers}


def _told(task):
    """The note without what differs between tasks of one wording."""
    return task.info["note"].replace(task.info["about"], "WHO").replace(task.references[0], "VALUE")


@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_notes_tell_the_value_and_questions_do_not(make):
    for split in ("train", "eval"):
        tasks = make(split, 480)
        assert all(task.references[0] in task.info["note"] for task in tasks)
        assert not any(f" {task.references[0]}" in task.question for task in tasks)
        assert tasks == make(split, 480)
    assert make("train", 480, seed=1) != make("train", 480)


@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_held_out_wordings_and_animals_are_never_trained_on(make):
    train, held_out = make("train", 1920), make("eval", 480)
    assert not set(map(_told, train)) & set(map(_told, held_out))
    assert not {t.info["about"].split()[1] for t in train} & {t.info["about"].split()[1] for t in held_out}
    assert overlap(train, held_out) == []


def test_code_words_are_enough_and_equally_frequent():
    assert len(set(CODE_WORDS)) == len(CODE_WORDS) >= 64
    held_out = [task.references[0] for task in code_words("eval", 480)]
    assert {held_out.count(word) for word in CODE_WORDS} == {5}


def test_numbers_have_each_length_equally_often():
    digits = [task.info["digits"] for task in numbers("eval", 600)]
    assert {digits.count(str(d)) for d in range(1, 7)} == {100}
    assert all(len(task.references[0]) == int(task.info["digits"]) for task in numbers("eval", 600))


@pytest.mark.parametrize("name", ["channel", "channel-ring", "channel-numbers"])
def test_t16_only_the_senders_prompt_tells(name):
    recipe = load(RECIPES / f"{name}.yaml", schema_for).tree
    config = recipe.recursivemas
    for task in load_tasks(recipe.data.eval)[:40]:
        for agent in config.graph.agents:
            for number in range(1, config.rounds + 1):
                parts = user_parts(config.prompt_of(agent, number), task, config.instruction)
                text = "".join(part.text for part in parts)
                assert (task.info["note"] in text) == (agent == "sender")
                assert agent == "sender" or task.references[0] not in text


@pytest.mark.parametrize(("inner_slots", "heard"), [("empty", ""), ("text", "moon moon moon moon")])
def test_t18_inner_links_may_train_behind_slots_that_hold_known_text(inner_slots, heard):
    own = {
        "style": "custom",
        "decoder": "b",
        "roles": {"a": {"prompt": "{task.note}"}, "b": {"prompt": "Heard: {a}."}},
        "edges": [{"source": "a", "target": "b"}],
        "allow_untrained": True,
        "train": {"stage": "inner", "inner_slots": inner_slots, "targets": {"a": "said"}},
    }
    model = {"name": "tiny-llama", "mode": "frozen", "dtype": "float32"}
    recipe = RecursiveRecipe.model_validate_json(
        json.dumps({"method": "recursivemas", "model": model, "recursivemas": own}), strict=True
    )
    system = load_system(recipe).system
    task = next(t for t in code_words("train", 96) if t.references == ("moon",))
    texts = read_texts(recipe, system, [task])
    (prompt,) = inner_prompts(system, recipe, "b", [task], texts)
    assert f"Heard: {heard}." in system.agents["b"].chat.format.decode(prompt.ids)


def test_notes_ask_what_they_tell():
    for asked, told in zip(notes("eval", 48), code_words("eval", 48), strict=True):
        assert (asked.question, asked.references, asked.id) == (told.info["note"], told.references, told.id)
        assert not asked.info
