"""`agentrl check --show-sample`: what every agent hears in rounds 1 and 2, where latents stand, and what is learned.

No weights are loaded and nothing thinks.
"""

from __future__ import annotations

from typing import Any

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.data import load_tasks
from agentrl.recipes.previews import refuse_absent_models
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.registry import Preview, VerbOptions
from agentrl.recipes.session import model_folder
from agentrl.types import MaskReason, Task


def preview(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """`samples`: a `Preview` per agent and round, on the first training question. Raises `MissingError` where a model
    is not on this machine, and `DataError` for a prompt that names a field which the data do not have."""
    refuse_absent_models(recipe)
    task = load_tasks(recipe.data)[0] if recipe.data.path else Task("sample", "What is asked here?")
    samples = []
    for name in recipe.recursivemas.graph.agents:
        policy = recipe.agents[name].policy
        folder = model_folder(recipe.policy_models[policy], policy, recipe.run.dir)
        chat = Chat(ChatFormat.from_folder(folder), enable_thinking=recipe.recursivemas.enable_thinking)
        config = recipe.recursivemas
        always = config.prompt_of(name, 1) == config.prompt_of(name, 2) or config.rounds == 1
        samples += [_heard(recipe, chat, name, number, task) for number in ((1,) if always else (1, 2))]
    return {"samples": samples}


def _heard(recipe: RecursiveRecipe, chat: Chat, name: str, round_number: int, task: Task) -> Preview:
    config = recipe.recursivemas
    text = config.prompt_of(name, round_number)
    runs = ids_around_slots(chat, config.system_of(name), text, task, config.instruction)
    parts: list[tuple[str, MaskReason | None]] = [(chat.format.decode(runs[0]), MaskReason.PROMPT)]
    for source, ids in zip(config.slots_of(name, round_number), runs[1:], strict=True):
        parts.append((f"{config.latent_steps} latent thoughts of {source}", MaskReason.WORLD))
        parts.append((chat.format.decode(ids), MaskReason.PROMPT))
    if name == config.graph.decoder and task.references:
        ending = chat.format.decode(chat.format.end_of_turn.marker)
        parts.append((config.train.template.replace("{answer}", task.references[0]) + ending, None))
    positions = sum(map(len, runs)) + (len(runs) - 1) * config.latent_steps
    return Preview(f"{name}, round {round_number}: {positions} positions", tuple(parts))
