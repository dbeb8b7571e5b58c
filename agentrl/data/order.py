"""Which tasks a run and a step take, as pure functions of their seeds, and whether two sets share questions."""

from __future__ import annotations

import hashlib
import random
import re
import unicodedata
from collections.abc import Sequence

from agentrl.data.contests import contest_key, same_problem
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task


def sample(tasks: Sequence[Task], size: int, seed: int) -> list[Task]:
    """`size` tasks drawn by their ids, in the order given: the same seed draws the same ids whatever that order is.

    Raises `DataError` when there are fewer tasks than that.
    """
    if size > len(tasks):
        raise DataError(f"sample: {size} is more than the {len(tasks)} tasks", "lower it, or give more data")
    drawn = set(random.Random(f"sample/{seed}").sample(sorted(task.id for task in tasks), size))
    return [task for task in tasks if task.id in drawn]


def order(
    tasks: Sequence[Task], seed: int, step: int, n: int, *, shuffle: bool = True, stratify: str | None = None
) -> list[Task]:
    """The `n` tasks of a step (steps count from 1). Nothing is remembered, so a resumed run takes what it would have.

    Each epoch is a shuffle of all tasks by seed and epoch, without replacement. A step that straddles two epochs
    never holds a task twice: the second epoch gives it the first tasks that the step does not have yet.
    With `stratify`, a key of `Task.info`, an epoch spreads the tasks of each of its values evenly.
    Raises `ConfigError` when there are fewer tasks than a step takes, and `DataError` for a task without that key.
    """
    size = len(tasks)
    if step < 1 or n < 1:
        raise ValueError(f"step {step} and n {n} must be at least 1")
    if n > size:
        raise ConfigError(
            f"rollout.questions_per_step: {n} is more than the {size} tasks of the data",
            f"set rollout.questions_per_step to at most {size}, or give more data",
        )
    strata = [_stratum(task, stratify) for task in tasks] if stratify is not None and shuffle else None
    start = (step - 1) * n
    picked: list[int] = []
    places: list[int] = []
    for epoch in range((start + n - 1) // size + 1):
        carried = places[size - (epoch * size) % n :] if epoch and (epoch * size) % n else []
        places = _epoch(size, seed, epoch, carried, n, shuffle, strata)
        first = max(start - epoch * size, 0)
        picked += places[first : max(start + n - epoch * size, 0)]
    return [tasks[place] for place in picked]


def _stratum(task: Task, key: str) -> str:
    if key not in task.info:
        raise DataError(f"data.stratify: task {task.id} has no {key!r}", f"it has {', '.join(task.info) or 'nothing'}")
    return str(task.info[key])


def _epoch(
    size: int, seed: int, epoch: int, carried: Sequence[int], n: int, shuffle: bool, strata: Sequence[str] | None
) -> list[int]:
    places = list(range(size))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(places)
    if strata is not None:
        places = _spread(places, strata)
    if not carried:
        return places
    taken = set(carried)
    head = [place for place in places if place not in taken][: n - len(carried)]
    chosen = set(head)
    return head + [place for place in places if place not in chosen]


def _spread(places: Sequence[int], strata: Sequence[str]) -> list[int]:
    """The places with each stratum at even distances, so that every stretch holds its share of each."""
    by_stratum: dict[str, list[int]] = {}
    for place in places:
        by_stratum.setdefault(strata[place], []).append(place)
    at = {p: (i + 0.5) / len(mine) for mine in by_stratum.values() for i, p in enumerate(mine)}
    return sorted(places, key=lambda place: at[place])  # stable: equal distances keep the shuffled order


def normalise(text: str) -> str:
    """A question without case, punctuation and extra spaces, for finding copies. Signs of arithmetic stay."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])", " ", plain)
    return " ".join(re.sub(r"[^\w\s+\-*/^=<>%|]|_", " ", plain).split())


def overlap(train: Sequence[Task], held_out: Sequence[Task]) -> list[tuple[str, str]]:
    """(train id, held-out id) of every held-out problem that is trained on too: the same text but for case, spaces and
    punctuation, or the same problem of the same contest (`contests.py`)."""
    by_text: dict[str, str] = {}
    by_number: dict[tuple[int, int], list[Task]] = {}
    for task in train:
        by_text.setdefault(normalise(task.question), task.id)
        key = contest_key(task)
        if key is not None:
            by_number.setdefault((key.year, key.number), []).append(task)
    found = []
    for task in held_out:
        same = by_text.get(normalise(task.question))
        key = contest_key(task)
        if same is None and key is not None:
            alike = by_number.get((key.year, key.number), ())
            same = next((t.id for t in alike if same_problem(key, contest_key(t))), None)
        if same is not None:
            found.append((same, task.id))
    return found


def fingerprint(tasks: Sequence[Task]) -> str:
    """A short name of a task list's content and order: a resumed run compares it with the one it was started on."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr((task.id, task.question, task.references)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]
