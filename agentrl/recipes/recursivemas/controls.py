"""Controls: the same system with its channel cut or crossed, so that a table shows what the latents are worth.

    none        m = 0: the slots stay empty (`recursivemas.latent_steps=0`)
    zero        every block is zeros
    shuffled    each block comes from a question with another answer
    single      the decoder alone, on the question and the instruction

Source: specs, sections 8.4 (m = 0 already gives most of the score) and 11.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from agentrl.errors import DataError
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.recipes.recursivemas.recursion import Send, System
from agentrl.types import Prompt, Task


def zeroed(send: Send) -> Send:
    """Blocks of the same shape that hold nothing."""

    def zero(edge: Edge, round_number: int, states_BmD: Tensor) -> Tensor:
        return send(edge, round_number, states_BmD).zero_()

    return zero


def shuffled(send: Send, order: Sequence[int]) -> Send:
    """Question b of the batch hears what was thought about question `order[b]`."""

    def shuffle(edge: Edge, round_number: int, states_BmD: Tensor) -> Tensor:
        return send(edge, round_number, states_BmD)[list(order)]

    return shuffle


def derangement(answers: Sequence[str | None], seed: int) -> tuple[int, ...]:
    """A permutation in which nobody hears a question with an equal answer, random for a seed.

    Sorted by answer and turned by the size of the largest group, no two equal answers meet. Raises `DataError` when
    more than half of the answers are equal, since there is none then.
    """
    largest = max(Counter(answers).values(), default=0)
    if 2 * largest > len(answers):
        raise DataError(
            f"{largest} of {len(answers)} answers are equal, so shuffled latents would often be right",
            "evaluate more questions at a time, with other answers",
        )
    drawn = list(range(len(answers)))
    random.Random(seed).shuffle(drawn)
    by_answer = sorted(drawn, key=lambda i: str(answers[i]))
    out = [0] * len(answers)
    for place, index in enumerate(by_answer):
        out[index] = by_answer[(place + largest) % len(by_answer)]
    return tuple(out)


def single_prompts(system: System, system_text: str, instruction: str, tasks: Sequence[Task]) -> tuple[Prompt, ...]:
    """What the decoder's model reads when it is alone: the question and the instruction, no role and no slot."""
    chat = system.agents[system.graph.decoder].chat
    return tuple(
        Prompt(ids_around_slots(chat, system_text, "{question}\n\n{instruction}", task, instruction)) for task in tasks
    )
