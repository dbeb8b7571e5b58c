"""The known texts that links are trained on: the answer that the decoder writes, and what other roles would have said.

Published training sets hold a question, an answer and, for sequential styles, `plan` and `refined_plan`; any data set
does, as long as it has a question and an answer. Texts are text from the world: they cannot write control tokens.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, and its released code (specs 5.4).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from agentrl.chat.format import ChatFormat
from agentrl.errors import DataError
from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import System
from agentrl.types import Task

Ids = tuple[int, ...]
ANSWER = "answer"
STYLE_TARGETS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        ("sequential_light", "sequential_scaled"), MappingProxyType({"planner": "plan", "critic": "refined_plan"})
    )
)


@dataclass(frozen=True, slots=True)
class Texts:
    """`answers` by task id, for tasks that have one; `targets` by agent, then task id; `sources`: the column that an
    agent's texts come from, or `answer`. `num_cut` texts were longer than `max_text_tokens`. `hearers`: the
    agents that say theirs after what they heard, in `hop_steps`."""

    answers: Mapping[str, Ids]
    targets: Mapping[str, Mapping[str, Ids]]
    sources: Mapping[str, str]
    num_cut: int
    hearers: frozenset[str] = frozenset()

    def of(self, agent: str, tasks: Sequence[Task]) -> list[Ids]:
        return [self.targets[agent][task.id] for task in tasks]

    def hops_of(self, tasks: Sequence[Task]) -> dict[str, list[Ids]]:
        return {agent: self.of(agent, tasks) for agent in sorted(self.hearers)}

    def answers_of(self, tasks: Sequence[Task]) -> list[Ids]:
        return [self.answers[task.id] for task in tasks]


def target_sources(config: RecursiveConfig, tasks: Sequence[Task]) -> dict[str, str]:
    """Agent -> where its known text comes from. The decoder's is the answer; without a column, so is another's.

    Raises `DataError` where a column that the recipe names is missing in a row, or where `teacher_forced` would read
    the answer, or a hop teach it, for want of a column.
    """
    named = config.train.targets
    usual = {
        agent: column
        for agent, column in STYLE_TARGETS.get(config.style, {}).items()
        if named is None and all(column in task.info for task in tasks)
    }
    sources = dict.fromkeys(config.graph.agents, ANSWER) | usual | dict(named or {})
    for agent, column in sources.items():
        _refuse_lacking(agent, column, tasks)
    _refuse_unknown_hops(config, sources)
    if config.train.form == "teacher_forced":
        for agent in config.graph.agents:
            if agent != config.graph.decoder and sources[agent] == ANSWER and (named or {}).get(agent) != ANSWER:
                raise DataError(
                    f"recursivemas.train.form: teacher_forced reads a known text of {agent}, and the data have none",
                    f"name its column: --set recursivemas.train.targets.{agent}=COLUMN (or answer, which leaks it)",
                )
    return sources


def _refuse_unknown_hops(config: RecursiveConfig, sources: Mapping[str, str]) -> None:
    """In a hop no agent is taught the answer for want of a column with its own text."""
    for agent in config.graph.agents:
        if agent not in config.hearers:
            continue
        if sources[agent] == ANSWER and (config.train.targets or {}).get(agent) != ANSWER:
            raise DataError(
                f"recursivemas.train.hop_steps: what {agent} says in a hop is not known, the data have no column of it",
                f"name one: --set recursivemas.train.targets.{agent}=COLUMN (or answer)",
            )


def _refuse_lacking(agent: str, column: str, tasks: Sequence[Task]) -> None:
    lacking = [task.id for task in tasks if column != ANSWER and not str(task.info.get(column) or "").strip()]
    if lacking:
        raise DataError(
            f"recursivemas.train.targets.{agent}: {len(lacking)} of {len(tasks)} rows have no text in column "
            f"{column!r}, {lacking[0]!r} first",
            "name another column, or answer",
        )


def read_texts(recipe: RecursiveRecipe, system: System, tasks: Sequence[Task]) -> Texts:
    """Every text of the tasks as ids of its agent's model, with the end of a turn where it was not cut. Raises
    `DataError` for a task without an answer, and as `target_sources`."""
    config = recipe.recursivemas
    sources = target_sources(config, tasks)
    targets, cut = _read(recipe, system, tasks, sources)
    return Texts(targets[config.graph.decoder], targets, sources, cut, config.hearers)


def held_out_sources(config: RecursiveConfig, tasks: Sequence[Task]) -> dict[str, str]:
    """The same as `target_sources` for held-out tasks, of which no more is read than what is measured on them: after
    stage 2 the answers alone, unless the leak probe lets agents read. Raises `DataError` as `target_sources`."""
    train = config.train
    if train.stage == "inner" or (train.leak_probe and train.form == "teacher_forced"):
        return target_sources(config, tasks)
    return {config.graph.decoder: ANSWER}


def read_held_out_texts(recipe: RecursiveRecipe, system: System, tasks: Sequence[Task]) -> Texts:
    """The texts of held-out tasks. Those that are answers are left out for a task without one, which has no loss."""
    sources = held_out_sources(recipe.recursivemas, tasks)
    targets, cut = _read(recipe, system, tasks, sources, may_lack_answers=True)
    return Texts(targets[recipe.recursivemas.graph.decoder], targets, sources, cut)


def _read(
    recipe: RecursiveRecipe,
    system: System,
    tasks: Sequence[Task],
    sources: Mapping[str, str],
    may_lack_answers: bool = False,
) -> tuple[dict[str, dict[str, Ids]], int]:
    """By agent, then task id; and how many were cut."""
    config = recipe.recursivemas
    limit, num_cut = config.train.max_text_tokens, 0
    targets: dict[str, dict[str, Ids]] = {}
    for agent, source in sources.items():
        format_ = system.agents[agent].chat.format
        targets[agent] = {}
        for task in tasks:
            if may_lack_answers and source == ANSWER and not task.references:
                continue
            text = known_text(config, source, task)
            ids = text_ids(format_, text)
            num_cut += len(ids) > limit
            targets[agent][task.id] = ids[:limit]
    return targets, num_cut


def known_text(config: RecursiveConfig, source: str, task: Task) -> str:
    """A task's text from a column, or its answer as the decoder writes it."""
    return _answer_text(config, task) if source == ANSWER else str(task.info[source])


def text_ids(format_: ChatFormat, text: str) -> Ids:
    """What a model writes when it says `text`: its ids and the end of the turn."""
    return (*format_.encode_world(text), *format_.end_of_turn.marker)


def _answer_text(config: RecursiveConfig, task: Task) -> str:
    if not task.references:
        raise DataError(f"task {task.id} has no answer to train on", "drop the row or give it an answer")
    return config.train.template.replace("{answer}", task.references[0])


# The leak probe


def with_random_answers(tasks: Sequence[Task], pool: Sequence[Task], seed: str) -> list[Task]:
    """The same tasks, each with an answer drawn from those of `pool`: nothing in a question tells it any more."""
    rng = random.Random(seed)
    return [replace(task, references=(rng.choice(pool).references[0],)) for task in tasks]
