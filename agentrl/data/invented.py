"""The embedded world: invented facts about animals, one page each, that no model can have read.

An animal is an adjective and a noun ("brave falcon"); its page holds two facts. The nouns of the held-out animals are
never used in training, and which fact is true of whom is drawn at random, so a question can be answered only from its
page. Pages of animals that share a word are natural distractors of each other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.types import Task


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ADJECTIVES = _words(
    "amber ancient azure brave clever copper crimson crooked dusty frozen gentle giant gloomy golden hollow hungry "
    "ivory lazy lucky merry nervous olive proud quiet scarlet silent silver sleepy tiny violet"
)
_TRAIN_ANIMALS = _words(
    "badger bear beetle camel donkey eagle fox goat goose heron hedgehog horse lion lizard monkey mouse otter panda "
    "penguin rabbit raven salmon tiger turtle"
)
_HELD_OUT_ANIMALS = _words("dolphin falcon frog hamster owl parrot seal spider squirrel swan whale wolf")


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact: how a page states it, how it is asked, how it is named, and its possible values."""

    name: str
    statement: str
    question: str
    values: tuple[str, ...]


RELATIONS = (
    Relation(
        "home",
        "The {animal} lives in {value}.",
        "Where does the {animal} live?",
        _words(
            "Amsterdam Athens Baghdad Bangkok Berlin Boston Brussels Budapest Cairo Chicago Copenhagen Dallas Delhi "
            "Denver Dublin Florence Geneva Hamburg Hanoi Havana Helsinki Jakarta Kabul Kiev Lima Lisbon London Madrid "
            "Manila Miami Milan Moscow Munich Nairobi Naples Oslo Paris Prague Rome Seattle Seoul Stockholm Sydney "
            "Tehran Tokyo Toronto Venice Vienna Warsaw Zurich"
        ),
    ),
    Relation(
        "food",
        "The {animal} eats {value}.",
        "What does the {animal} eat?",
        _words(
            "apples bacon beans berries bread butter cake candy carrots cheese cherries clams corn crab dates eggs "
            "figs fish garlic grapes honey lemons melons nuts oats onions pasta peaches pepper pizza plums potatoes "
            "rice salt seaweed shrimp soup sugar tomatoes wheat"
        ),
    ),
    Relation(
        "tool",
        "The {animal} owns a {value}.",
        "What does the {animal} own?",
        _words(
            "basket bell bicycle blanket boat book broom brush bucket candle clock coin compass crown drum guitar "
            "hammer helmet jacket kettle kite knife ladder lantern map mirror needle pencil piano pillow ring rope "
            "scarf shovel spoon trumpet violin wagon whistle"
        ),
    ),
    Relation(
        "friend",
        "The {animal} is a friend of {value}.",
        "Who is a friend of the {animal}?",
        _words(
            "Alice Anna Arthur Clara David Diana Edith Edward Emma Felix Frank George Grace Harold Helen Henry Hugo "
            "Irene Julia Laura Linda Lucy Maria Martin Max Nora Oliver Oscar Paul Peter Robert Rosa Ruth Sarah Simon "
            "Sophie Susan Thomas Victor Walter"
        ),
    ),
)
_WORLD_SEED = 20260131
_FACTS = 2


@dataclass(frozen=True, slots=True)
class Page:
    """An animal and its facts, as (relation, value) in the order in which the page states them."""

    animal: str
    split: str
    facts: tuple[tuple[Relation, str], ...]

    @property
    def text(self) -> str:
        return " ".join(r.statement.format(animal=self.animal, value=v) for r, v in self.facts)


def pages() -> list[Page]:
    """The whole world, always the same, in an order that says nothing."""
    rng = random.Random(_WORLD_SEED)
    found = []
    for split, nouns in (("train", _TRAIN_ANIMALS), ("eval", _HELD_OUT_ANIMALS)):
        for noun in nouns:
            for adjective in _ADJECTIVES:
                facts = tuple((r, rng.choice(r.values)) for r in rng.sample(RELATIONS, _FACTS))
                found.append(Page(f"{adjective} {noun}", split, facts))
    rng.shuffle(found)
    return found


def corpus() -> list[dict[str, str]]:
    """Every page of both splits as a row with `title` and `text`."""
    return [{"title": page.animal, "text": page.text} for page in pages()]


def generate(split: str, n: int, seed: int = 0) -> list[Task]:
    """`n` questions of a split, one per animal: the training ones drawn by `seed`, the held-out ones always the same.

    Raises `ConfigError` when the split has fewer animals than `n`.
    """
    mine = [page for page in pages() if page.split == split]
    if n > len(mine):
        raise ConfigError(f"data.limit: {n} is more than the {len(mine)} {split} questions", "lower data.limit")
    rng = random.Random(f"{split}-{seed if split == 'train' else 0}")
    rng.shuffle(mine)
    tasks = []
    for page in mine[:n]:
        relation, value = rng.choice(page.facts)
        question = relation.question.format(animal=page.animal)
        task_id = f"{split}-{page.animal.replace(' ', '-')}-{relation.name}"
        tasks.append(Task(task_id, question, (value,), info={"animal": page.animal, "relation": relation.name}))
    return tasks
