"""Whether every question of a training run fits its agents' windows, with latents and known texts, before step 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from agentrl.errors import DataError
from agentrl.recipes.recursivemas.losses import MAX_BLOCK
from agentrl.recipes.recursivemas.prompts import ids_around_slots, task_fields_in, user_parts
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import System
from agentrl.recipes.recursivemas.texts import Texts, known_text
from agentrl.types import Task

Reading = Literal["inner", "used", "forced"]


def refuse_long_tasks(
    recipe: RecursiveRecipe, system: System, tasks: Sequence[Task], texts: Texts, held_out: bool
) -> None:
    """Raises `DataError` for a question that some agent's window does not hold together with its latents and the text
    that is read after it, with the sizes.

    A text has no more tokens than bytes, so only questions that might not fit are counted token by token.
    """
    key = "data.eval.path" if held_out else "data.path"
    for reading in _readings(recipe, held_out):
        limit = recipe.engine.max_model_len if held_out and reading == "used" else None
        for agent, round_number in _prompts(recipe, reading):
            window = min(system.agents[agent].backbone.window, limit or system.agents[agent].backbone.window)
            frame = _length(recipe, system, agent, round_number, None)
            for task in tasks:
                if reading == "inner" and not task.references:
                    continue
                more = _more(recipe, system, texts, reading, agent, round_number, task)
                if frame + _bytes(recipe, agent, round_number, task) + more <= window:
                    continue
                length = _length(recipe, system, agent, round_number, task)
                if length + more > window:
                    raise DataError(
                        f"{key}: question {task.id}: agent {agent}'s prompt of {length} tokens needs {length + more} "
                        f"positions in round {round_number} with latents and known text, the window of "
                        f"{system.agents[agent].backbone.name} is {window}",
                        "drop or shorten it, or lower recursivemas.latent_steps or train.max_text_tokens",
                    )


def _readings(recipe: RecursiveRecipe, held_out: bool) -> tuple[Reading, ...]:
    """How the questions are read: behind inner links alone, as the ring is used, or at known texts."""
    train = recipe.recursivemas.train
    forced = train.form == "teacher_forced"
    if held_out:
        if train.stage == "inner":
            return ("inner",)
        return ("used", "forced") if train.leak_probe and forced else ("used",)
    outer: Reading = "forced" if forced else "used"
    if train.stage == "both":
        return ("inner", outer)
    return ("inner",) if train.stage == "inner" else (outer,)


def _prompts(recipe: RecursiveRecipe, reading: Reading) -> Iterator[tuple[str, int]]:
    """Agents and the rounds whose prompts differ."""
    config = recipe.recursivemas
    for agent in config.graph.agents:
        for round_number in range(1, 1 + (1 if reading == "inner" else min(config.rounds, 2))):
            yield agent, round_number


def _length(recipe: RecursiveRecipe, system: System, agent: str, round_number: int, task: Task | None) -> int:
    """Tokens of a prompt without its blocks; of no task: of what all prompts have in common."""
    config = recipe.recursivemas
    text = config.prompt_of(agent, round_number)
    if task is None:
        task = Task("none", "", info={field.removeprefix("task."): "" for field in task_fields_in(text)})
    runs = ids_around_slots(system.agents[agent].chat, config.system_of(agent), text, task, config.instruction)
    return sum(map(len, runs))


def _bytes(recipe: RecursiveRecipe, agent: str, round_number: int, task: Task) -> int:
    """Bytes of what a task adds to a prompt."""
    config = recipe.recursivemas
    parts = user_parts(config.prompt_of(agent, round_number), task, config.instruction)
    return sum(len(part.text.encode("utf-8", "backslashreplace")) for part in parts if not part.trusted)


def _more(
    recipe: RecursiveRecipe, system: System, texts: Texts, reading: Reading, agent: str, round_number: int, task: Task
) -> int:
    """Positions of the blocks in a prompt and of what comes after it."""
    config = recipe.recursivemas
    slots, decoder = config.slots_of(agent, round_number), agent == config.graph.decoder
    answer = len(texts.answers.get(task.id, ())) if decoder else 0
    if reading == "used":
        if slots and agent in texts.hearers:
            answer = len(texts.targets[agent][task.id])
        return len(slots) * config.latent_steps + max(config.latent_steps - 1, int(decoder), answer)
    if reading == "forced":
        read = {name: min(len(ids[task.id]), MAX_BLOCK) for name, ids in texts.targets.items()}
        return sum(read[source] for source in slots) + max(read[agent], answer)
    said = 0
    if config.train.inner_slots == "text":
        encode = system.agents[agent].chat.format.encode_world
        said = sum(len(encode(known_text(config, texts.sources[source], task))) for source in slots)
    return said + len(texts.targets[agent][task.id])
