"""The embedded world: same for everyone, answerable from its pages only, held-out animals unseen in training."""

from __future__ import annotations

import pytest

from agentrl.config.load import load
from agentrl.data.invented import corpus, generate, pages
from agentrl.errors import ConfigError
from agentrl.recipes.registry import schema_for


def test_held_out_animals_never_occur_in_training_questions_or_examples() -> None:
    train, held_out = generate("train", 720), generate("eval", 240)
    nouns = {t.info["animal"].split()[1] for t in held_out}
    recipe = load("mars-embedded", schema_for).tree
    heard = [t.question for t in train] + [e.content for a in recipe.agents.values() for e in a.examples]
    words = {word.strip(".?,<>/") for text in heard for word in text.replace("<", " ").split()}
    assert len(nouns) == 12
    assert not nouns & words


def test_every_answer_stands_on_the_animals_own_page_and_nowhere_in_the_question() -> None:
    texts = {row["title"]: row["text"] for row in corpus()}
    assert len(texts) == len(pages()) == 36 * 30
    for task in generate("train", 720) + generate("eval", 240):
        assert task.references[0] in texts[task.info["animal"]]
        assert task.references[0] not in task.question


def test_no_answer_can_be_had_without_its_page() -> None:
    tasks = generate("eval", 240)
    for relation in ("home", "food", "tool", "friend"):
        answers = [t.references[0] for t in tasks if t.info["relation"] == relation]
        assert max(map(answers.count, answers)) / len(answers) < 0.15


def test_the_held_out_set_is_the_same_for_every_seed_and_the_training_set_is_not() -> None:
    assert generate("eval", 200, seed=1) == generate("eval", 200, seed=2)
    assert generate("train", 100, seed=1) == generate("train", 100, seed=1)
    assert generate("train", 100, seed=1) != generate("train", 100, seed=2)


def test_more_questions_than_animals_are_refused() -> None:
    with pytest.raises(ConfigError, match="361 is more than the 360 eval questions"):
        generate("eval", 361)
