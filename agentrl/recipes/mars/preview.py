"""`agentrl check --show-sample`: one rollout as both roles would see it, cut where the loss mask changes.

Tokenizers and templates are the model's own; the replies are scripted and the tool's results made up, so no weights
are loaded, no index is built and no tool is called. Budgets are set aside, so that a reply is never cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.chat.format import ChatFormat
from agentrl.data import load_tasks
from agentrl.protocols import Tool
from agentrl.recipes.canned import canned_tools, example_arguments
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.roles import SYSTEM2
from agentrl.recipes.mars.setup import make_workflow, samples_of, window
from agentrl.recipes.previews import one_rollout, preview_of, refuse_absent_models, scripted_session
from agentrl.recipes.registry import VerbOptions
from agentrl.types import Request, Sample, Score, ScoredTrajectory, Task

QUESTION = "What is asked here?"
AMPLE = 100_000  # tokens
DIGEST = "What serves the purpose, in the words of System 1."


def preview(recipe: MarsRecipe, options: VerbOptions) -> dict[str, Any]:
    """`samples`: a `Preview` per sample of one rollout of the first training question. Raises `MissingError` where the
    model is not on this machine, and `ConfigError` for a template or a tool that does not fit."""
    refuse_absent_models(recipe)
    task = load_tasks(recipe.data)[0] if recipe.data.path else Task("sample", QUESTION)
    samples, formats = asyncio.run(_scripted(_without_budgets(recipe), task))
    return {"samples": [preview_of(sample, formats[sample.policy]) for sample in samples]}


def _without_budgets(recipe: MarsRecipe) -> MarsRecipe:
    agents = {
        name: agent.model_copy(
            update={
                "sampling": agent.sampling.model_copy(update={"max_tokens": AMPLE}),
                "max_prompt_tokens": AMPLE,
                "max_response_tokens": recipe.mars.answer_reserve + AMPLE,
            }
        )
        for name, agent in recipe.agents.items()
    }
    return recipe.model_copy(update={"agents": agents})


async def _scripted(recipe: MarsRecipe, task: Task) -> tuple[list[Sample], Mapping[str, ChatFormat]]:
    tools = canned_tools(recipe)
    session = scripted_session(recipe, _script(recipe, tools), tools, window(recipe))
    trajectory = await one_rollout(session, make_workflow(recipe, session), task)
    scored = ScoredTrajectory(trajectory, Score(1.0), (None,) * len(trajectory.turns))
    return samples_of(recipe, scored), session.formats


def _script(recipe: MarsRecipe, tools: Mapping[str, Tool]) -> Callable[[Request, str], str]:
    """System 2 calls the first of its tools, then answers; System 1 says `DIGEST`."""
    mars, names = recipe.mars, recipe.system2_tools

    def reply(request: Request, prompt: str) -> str:
        if list(recipe.agents)[request.key.agent] != SYSTEM2:
            return DIGEST
        if request.key.turn > 0 or not names:
            return f"<answer>{'ANSWER'[: mars.max_answer_chars]}</answer>"
        name, purpose = names[0], "what I need to learn and why"
        if mars.call_syntax == "tag":
            query = "key words"[: mars.max_query_chars].strip()
            return f"<{name}>{query} | {purpose[: mars.max_purpose_chars].strip()}</{name}>"
        call = json.dumps({"name": name, "arguments": example_arguments(tools[name]), "purpose": purpose})
        return f"<tool_call>{call}</tool_call>"

    return reply
