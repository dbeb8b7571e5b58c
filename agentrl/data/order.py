"""Which tasks a step takes, as a pure function of seed and step, and whether two sets share questions."""

from __future__ import annotations

import hashlib
import random
import re
import unicodedata
from collections.abc import Sequence

from agentrl.errors import ConfigError
from agentrl.types import Task


def order(tasks: Sequence[Task], seed: int, step: int, n: int, *, shuffle: bool = True) -> list[Task]:
    """The `n` tasks of a step (steps count from 1). Nothing is remembered, so a resumed run takes what it would have.

    Each epoch is a shuffle of all tasks by seed and epoch, without replacement. A step that straddles two epochs
    never holds a task twice: the second epoch gives it the first tasks that the step does not have yet.
    Raises `ConfigError` when there are fewer tasks than a step takes.
    """
    size = len(tasks)
    if step < 1 or n < 1:
        raise ValueError(f"step {step} and n {n} must be at least 1")
    if n > size:
        raise ConfigError(
            f"rollout.questions_per_step: {n} is more than the {size} tasks of the data",
            f"set rollout.questions_per_step to at most {size}, or give more data",
        )
    start = (step - 1) * n
    picked: list[int] = []
    places: list[int] = []
    for epoch in range((start + n - 1) // size + 1):
        carried = places[size - (epoch * size) % n :] if epoch and (epoch * size) % n else []
        places = _epoch(size, seed, epoch, carried, n, shuffle)
        first = max(start - epoch * size, 0)
        picked += places[first : max(start + n - epoch * size, 0)]
    return [tasks[place] for place in picked]


def _epoch(size: int, seed: int, epoch: int, carried: Sequence[int], n: int, shuffle: bool) -> list[int]:
    places = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(places)
    if not carried:
        return places
    taken = set(carried)
    head = [place for place in places if place not in taken][: n - len(carried)]
    chosen = set(head)
    return head + [place for place in places if place not in chosen]


def normalise(text: str) -> str:
    """A question without case, punctuation and extra spaces, for finding copies. Signs of arithmetic stay."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])", " ", plain)
    return " ".join(re.sub(r"[^\w\s+\-*/^=<>%|]|_", " ", plain).split())


def overlap(train: Sequence[Task], held_out: Sequence[Task]) -> list[tuple[str, str]]:
    """(train id, held-out id) of every held-out question that the training set also asks."""
    known: dict[str, str] = {}
    for task in train:
        known.setdefault(normalise(task.question), task.id)
    keys = [(normalise(task.question), task.id) for task in held_out]
    return [(known[key], name) for key, name in keys if key in known]


def fingerprint(tasks: Sequence[Task]) -> str:
    """A short name of a task list's content and order: a resumed run compares it with the one it was started on."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr((task.id, task.question, task.references)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]
