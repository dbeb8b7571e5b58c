"""The embedded set `invented-pages`: the questions of `invented` with the facts above them, for teams without tools.

Each question follows the two facts of its own page and two of another animal's, shuffled. Training and held-out
questions share no animal.
"""

from __future__ import annotations

import random

from agentrl.data.invented import generate as generate_questions
from agentrl.data.invented import pages
from agentrl.types import Task


def generate(split: str, n: int, seed: int = 0) -> list[Task]:
    """`n` questions of a split with their facts; `info` holds the `sentence` that answers. Raises as `invented`."""
    mine = [page for page in pages() if page.split == split]
    by_animal = {page.animal: page for page in mine}
    tasks = []
    for task in generate_questions(split, n, seed):
        page = by_animal[task.info["animal"]]
        rng = random.Random(task.id)
        other = rng.choice([one for one in mine if one is not page])
        facts = [r.statement.format(animal=one.animal, value=v) for one in (page, other) for r, v in one.facts]
        sentence = next(
            r.statement.format(animal=page.animal, value=v) for r, v in page.facts if r.name == task.info["relation"]
        )
        rng.shuffle(facts)
        text = f"{' '.join(facts)}\n{task.question}"
        tasks.append(Task(task.id, text, task.references, info={**task.info, "sentence": sentence}))
    return tasks
