"""`agentrl check --show-sample`: one rollout of the team as each agent would see it, cut where the loss mask changes.

Replies are scripted and tools' results made up, so no weights are loaded and no tool is called. Budgets are set aside,
so that a reply is never cut.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.chat.format import ChatFormat
from agentrl.data import load_tasks
from agentrl.protocols import Tool
from agentrl.recipes.canned import canned_tools, example_arguments
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.setup import make_workflow, samples_of, window
from agentrl.recipes.previews import one_rollout, preview_of, refuse_absent_models, scripted_session
from agentrl.recipes.registry import VerbOptions
from agentrl.types import Request, Sample, Score, ScoredTrajectory, Task

QUESTION = "What is asked here?"
AMPLE = 50_000  # tokens


def preview(recipe: MappaRecipe, options: VerbOptions) -> dict[str, Any]:
    """`samples`: a `Preview` per visit of an agent, on the first training question. Raises `MissingError` where a model
    is not on this machine, and `ConfigError` for a template or a tool that does not fit."""
    refuse_absent_models(recipe)
    task = load_tasks(recipe.data)[0] if recipe.data.path else Task("sample", QUESTION)
    samples, formats = asyncio.run(_scripted(_without_budgets(recipe), task))
    return {"samples": [preview_of(sample, formats[sample.policy]) for sample in samples]}


def _without_budgets(recipe: MappaRecipe) -> MappaRecipe:
    ample = {"max_prompt_tokens": AMPLE, "max_response_tokens": AMPLE}
    agents = {
        name: agent.model_copy(
            update={"sampling": agent.sampling.model_copy(update={"max_tokens": AMPLE // 10}), **ample}
        )
        for name, agent in recipe.agents.items()
    }
    return recipe.model_copy(update={"agents": agents})


async def _scripted(recipe: MappaRecipe, task: Task) -> tuple[tuple[Sample, ...], Mapping[str, ChatFormat]]:
    tools = canned_tools(recipe)
    session = scripted_session(recipe, _script(recipe, tools), tools, window(recipe))
    trajectory = await one_rollout(session, make_workflow(recipe, session), task)
    scored = ScoredTrajectory(trajectory, Score(1.0), (Score(10.0),) * len(trajectory.turns))
    return samples_of(recipe, [scored]).samples, session.formats


def _script(recipe: MappaRecipe, tools: Mapping[str, Tool]) -> Callable[[Request, str], str]:
    """An agent with tools and turns calls the first of them once, then says its part."""
    names = list(recipe.agents)
    spoken: Counter[str] = Counter()

    def reply(request: Request, prompt: str) -> str:
        name = names[request.key.agent]
        agent = recipe.agents[name]
        spoken[name] += 1
        if agent.tools and agent.max_turns > 1 and spoken[name] % 2:
            tool = tools[agent.tools[0]]
            call = json.dumps({"name": tool.name, "arguments": example_arguments(tool)})
            return f"<tool_call>{call}</tool_call>"
        return "<answer>ANSWER</answer>" if name == recipe.answers else f"What {name} has to say."

    return reply
