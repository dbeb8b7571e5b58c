"""Facts for a channel: a note that only one agent may read, and what everybody may be asked about it.

A task's question ("What is the code word of the brave whale?") tells nothing; the fact stands in its field `note`,
which a prompt names as {task.note}. Held-out tasks use other wordings and other animals than the training ones; the
values are the same, drawn at random, so that only the note tells.
"""

from __future__ import annotations

import random
from dataclasses import replace

from agentrl.types import Task


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CODE_WORDS = _words(
    "apple bread corn rice salt soup sugar wheat bell boat bucket clock coin map ring river forest castle bridge tower "
    "window table chair gold iron stone glass paper summer winter spring rain snow wind storm cloud star moon sun "
    "planet engine wheel motor anchor market school church museum library hospital station doctor teacher king water "
    "fire tree flower leaf root road train plane ship car milk egg meat fruit oil coal sand light music hat coat ball "
    "stick wall floor bed hand foot heart bone hill lake ocean farm street park bank shop seed grass rose"
)
MAX_DIGITS = 6
_ADJECTIVES = _words(
    "amber ancient azure brave clever crimson crooked dusty gentle giant gloomy hollow hungry lazy lucky merry nervous "
    "proud quiet scarlet silent sleepy tiny violet"
)
_ANIMALS = {
    "train": _words(
        "badger beetle camel donkey eagle goat goose heron hedgehog horse lizard monkey otter panda penguin rabbit "
        "raven salmon tiger turtle"
    ),
    "eval": _words("dolphin falcon frog hamster owl parrot seal spider squirrel swan whale wolf"),
}
_NOTES = {
    "train": (
        "The {kind} of the {who} is {value}.",
        "{value} is the {kind} of the {who}.",
        "For the {who} the {kind} {value} was chosen.",
        "Everyone knows that the {who} has the {kind} {value}.",
        "The {who} answers to the {kind} {value}.",
        "Let {value} be the {kind} of the {who}.",
        "The {who} picked {value} as its {kind}.",
        "Please note: {kind} {value}, owner the {who}.",
        "Since Monday the {kind} {value} belongs to the {who}.",
        "The {who} was given a new {kind}, {value}, and likes it.",
        "If you meet the {who}, its {kind} is {value}.",
        "The guard wrote {value} beside the name of the {who} as its {kind}.",
        "Of all choices, {value} became the {kind} of the {who}.",
        "Ask the {who} for its {kind} and it says {value}.",
        "{kind}: {value}. Owner: the {who}.",
        "The {who} once lost its {kind}, which is {value}.",
        "We agreed on {value} as the {kind} for the {who}.",
        "My friend the {who} uses {value} as a {kind}.",
        "The {kind} {value} was set by the {who} last night.",
        "Under {who} the list shows the {kind} {value}.",
        "A {who} came in and gave the {kind} {value}.",
        "Only the {who} knew that {value} was the {kind}.",
        "{value}, said the {who}, is my {kind}.",
        "Nobody but the {who} may use {value}, the {kind}.",
        "I think that {value} is a fine {kind} for the {who}.",
        "The {kind} is {value}, and the {who} keeps it.",
        "Remember that the {who} changed the {kind} to {value}.",
        "There is a {who} here with the {kind} {value}.",
        "When asked, the {who} wrote {value} into the box for the {kind}.",
        "With the {kind} {value} the {who} could enter.",
        "It took the {who} a week to learn the {kind} {value}.",
        "The {who} has one {kind}: {value}.",
        "From now on {value} will be the {kind} of every {who}.",
        "They call {value} the {kind} of the {who}.",
        "On its first day the {who} got the {kind} {value}.",
        "{value} must be given as the {kind} when the {who} calls.",
        "The {kind} ({value}) comes from the {who}.",
        "The old {kind} is gone; the {who} now has {value}.",
        "Say {value} to the {who}, since that is the {kind}.",
        "The {who} likes {value} best and made it the {kind}.",
    ),
    "eval": (
        "The {who} goes by the {kind} {value}.",
        "It was decided that the {who} gets {value} for a {kind}.",
        "Whoever looks for the {who} must say its {kind}, {value}.",
        "The {kind} that the {who} keeps is {value}.",
        "Yesterday {value} was made the {kind} of the {who}.",
        "In the log, {value} stands as the {kind} of our {who}.",
        "The {who} told me that its {kind} is {value}.",
        "Do not forget {value}, the {kind} that belongs to the {who}.",
        "The {who} has {value} for its {kind}.",
        "On the sign of the {who} you can read the {kind} {value}.",
    ),
}


def code_words(split: str, n: int, seed: int = 0) -> list[Task]:
    """`n` tasks whose answer is one of `CODE_WORDS`, in equal shares where n allows it: the training ones drawn by
    `seed`, the held-out ones always the same. Fields: `note`, `about` (the animal), and `said` (the word four times:
    what an agent that thinks aloud would say)."""
    rng = _rng("word", split, seed)
    words: list[str] = []
    while len(words) < n:
        words += rng.sample(CODE_WORDS, len(CODE_WORDS))
    return _tasks("code word", split, words[:n], rng)


def notes(split: str, n: int, seed: int = 0) -> list[Task]:
    """The tasks of `code_words` whose question is the note itself, for a ring that is asked by whoever runs it."""
    return [replace(task, question=task.info["note"], info={}) for task in code_words(split, n, seed)]


def numbers(split: str, n: int, seed: int = 0) -> list[Task]:
    """`n` tasks whose answer is a random number of 1 to `MAX_DIGITS` digits, each length in equal shares. Fields:
    `note`, `about`, `said` (the number), and `digits` (how many it has)."""
    rng = _rng("number", split, seed)
    drawn = []
    for index in range(n):
        digits = index % MAX_DIGITS + 1
        drawn.append(str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)))
    rng.shuffle(drawn)
    return _tasks("number", split, drawn, rng)


def _rng(kind: str, split: str, seed: int) -> random.Random:
    return random.Random(f"channel-{kind}-{split}-{seed if split == 'train' else 0}")


def _tasks(kind: str, split: str, values: list[str], rng: random.Random) -> list[Task]:
    tasks = []
    for index, value in enumerate(values):
        who = f"{rng.choice(_ADJECTIVES)} {rng.choice(_ANIMALS[split])}"
        note = rng.choice(_NOTES[split]).format(kind=kind, who=who, value=value)
        if kind == "number":
            info = {"note": note, "about": who, "said": value, "digits": str(len(value))}
        else:
            info = {"note": note, "about": who, "said": " ".join([value] * 4)}
        question = f"What is the {kind} of the {who}?"
        tasks.append(Task(f"{split}-{index:04d}", question, (value,), info=info))
    return tasks
