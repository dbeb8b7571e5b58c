"""The embedded set `arithmetic`: sums, differences and products in words, whose answers are whole numbers.

Training and held-out questions share no pair of numbers under one operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from agentrl.errors import ConfigError
from agentrl.types import Task

_FORMS: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("plus", "What is {a} plus {b}?", lambda a, b: a + b),
    ("minus", "What is {a} minus {b}?", lambda a, b: a - b),
    ("times", "What is {a} times {b}?", lambda a, b: a * b),
)
_WORLD_SEED = 20260131
_HELD_OUT_SHARE = 0.2


def generate(split: str, n: int, seed: int = 0) -> list[Task]:
    """`n` questions of a split: the training ones drawn by `seed`, the held-out ones always the same.

    Raises `ConfigError` when the split has fewer than `n`.
    """
    every = [(form, a, b) for form in range(len(_FORMS)) for a in range(2, 21) for b in range(2, a + 1)]
    random.Random(_WORLD_SEED).shuffle(every)
    cut = round(len(every) * _HELD_OUT_SHARE)
    mine = every[:cut] if split == "eval" else every[cut:]
    if n > len(mine):
        raise ConfigError(f"data.limit: {n} is more than the {len(mine)} {split} questions", "lower data.limit")
    random.Random(f"{split}-{seed if split == 'train' else 0}").shuffle(mine)
    tasks = []
    for form, a, b in mine[:n]:
        name, question, answer = _FORMS[form]
        tasks.append(Task(f"{split}-{a}-{name}-{b}", question.format(a=a, b=b), (str(answer(a, b)),)))
    return tasks
