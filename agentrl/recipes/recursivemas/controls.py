"""Controls: the same system with its channel cut or crossed, so that a table shows what the latents are worth.

    none        m = 0: the slots stay empty (`recursivemas.latent_steps=0`)
    zero        every block is zeros
    shuffled    the decoder hears what was thought about a question with another answer
    single      the decoder alone, on the question, the instruction and the fields of the task that its prompts name
    text        written messages instead of blocks (`text_team`)

Source: specs, sections 8.4 (m = 0 already gives most of the score) and 11.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from agentrl.errors import DataError
from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.recipes.recursivemas.prompts import ids_around_slots, task_fields_in
from agentrl.recipes.recursivemas.recursion import Send, System
from agentrl.types import Prompt, Task


def zeroed(send: Send) -> Send:
    """Blocks of the same shape that hold nothing."""

    def zero(edge: Edge, round_number: int, states_BmD: Tensor) -> Tensor:
        return send(edge, round_number, states_BmD).zero_()

    return zero


def shuffled(send: Send, order: Sequence[int], decoder: str, rounds: int) -> Send:
    """In its last prompt the decoder hears, at question b of the batch, what was thought about question `order[b]`.

    Blocks are crossed once, where that prompt reads them. Were every edge crossed, a second swap would undo the first,
    and a ring would hear its own thoughts again.
    """

    def shuffle(edge: Edge, round_number: int, states_BmD: Tensor) -> Tensor:
        block_BmE = send(edge, round_number, states_BmD)
        read_last = round_number == (rounds - 1 if edge.feedback else rounds)
        return block_BmE[list(order)] if read_last and edge.target == decoder else block_BmE

    return shuffle


def partners(answers: Sequence[str | None], seed: int) -> tuple[tuple[int, ...], ...]:
    """All questions in pairs, or one group of three, whose answers differ: whoever thinks together can be crossed.

    Sorted by answer, questions half the list apart cannot be equal unless more than half are. Raises `DataError` when
    more than half of the answers are equal, since there is no such grouping then.
    """
    total, largest = len(answers), max(Counter(answers).values(), default=0)
    if 2 * largest > total:
        raise DataError(
            f"{largest} of {total} answers are equal, so shuffled latents would often be right",
            "evaluate more questions, with other answers, or leave out the control shuffled",
        )
    drawn = random.Random(seed)
    places = list(range(total))
    drawn.shuffle(places)
    by_answer = sorted(places, key=lambda i: str(answers[i]))
    half = total // 2
    groups: list[tuple[int, ...]] = [(by_answer[i], by_answer[i + half]) for i in range(total % 2, half)]
    if total % 2:
        groups = [(by_answer[0], by_answer[half], by_answer[2 * half]), *groups]
    drawn.shuffle(groups)
    return tuple(groups)


def answers_of(tasks: Sequence[Task]) -> list[str]:
    """A name for each question's answer: two have the same if any reference is both's, or through others in between."""
    parent = list(range(len(tasks)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, task in enumerate(tasks):
        for reference in task.references:
            parent[root(index)] = root(first.setdefault(reference, index))
    names: dict[int, str] = {}
    for index, task in enumerate(tasks):
        own = min(task.references, default=f"task {task.id}")
        names[root(index)] = min(own, names.get(root(index), own))
    return [names[root(index)] for index in range(len(tasks))]


@dataclass(frozen=True, slots=True)
class Crossed:
    """Questions that think together, and of whom each hears: `order[b]` is a place in `tasks`."""

    tasks: tuple[Task, ...]
    order: tuple[int, ...]


def crossed_batches(tasks: Sequence[Task], size: int, seed: int) -> list[Crossed]:
    """Batches of about `size` questions (two or three at least) that are crossed among themselves: nobody hears of a
    question with which it shares a reference answer. A question without one counts as having one of its own. Raises
    `DataError` as `partners`."""
    batches: list[list[tuple[int, ...]]] = [[]]
    for group in partners(answers_of(tasks), seed):
        if batches[-1] and sum(map(len, batches[-1])) + len(group) > size:
            batches.append([])
        batches[-1].append(group)
    out = []
    for batch in batches:
        flat = [index for group in batch for index in group]
        place = {index: at for at, index in enumerate(flat)}
        hears = {index: group[(i + 1) % len(group)] for group in batch for i, index in enumerate(group)}
        out.append(Crossed(tuple(tasks[i] for i in flat), tuple(place[hears[i]] for i in flat)))
    return out


def single_prompts(system: System, config: RecursiveConfig, tasks: Sequence[Task]) -> tuple[Prompt, ...]:
    """What the decoder's model reads when it is alone: the question, the fields of the task that its own last prompt
    names, and the instruction; no role, no slot, and nothing that only other agents read. Raises `DataError` for a
    task without such a field."""
    decoder = system.graph.decoder
    own = task_fields_in(config.prompt_of(decoder, config.rounds))
    text = "\n\n".join(["{question}", *(f"{{{field}}}" for field in own), "{instruction}"])
    chat, system_text = system.agents[decoder].chat, config.system_of(decoder)
    return tuple(Prompt(ids_around_slots(chat, system_text, text, task, config.instruction)) for task in tasks)
