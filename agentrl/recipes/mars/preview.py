"""`agentrl check --show-sample`: one rollout as both roles would see it, cut where the loss mask changes.

Tokenizers and templates are the model's own; the replies are scripted and the tool's results made up, so no weights
are loaded, no index is built and no tool is called. Budgets are set aside, so that a reply is never cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from agentrl.chat.format import ChatFormat
from agentrl.config.schema import LaunchConfig
from agentrl.data import load_tasks
from agentrl.errors import MissingError, RunFailedError
from agentrl.launch.devices import detect, plan
from agentrl.models import TINY_NAMES, find
from agentrl.protocols import Tool
from agentrl.recipes.mars.canned import canned_tools
from agentrl.recipes.mars.config import SYSTEM2, MarsRecipe
from agentrl.recipes.mars.setup import make_workflow, samples_of, window
from agentrl.recipes.registry import Preview, VerbOptions
from agentrl.recipes.session import Session, model_folder
from agentrl.rollout.gate import Gate
from agentrl.rollout.runner import Job, run_jobs
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import MaskReason, Request, Sample, Score, ScoredTrajectory, Task

QUESTION = "What is asked here?"
AMPLE = 100_000  # tokens
DIGEST = "What serves the purpose, in the words of System 1."


def preview(recipe: MarsRecipe, options: VerbOptions) -> dict[str, Any]:
    """`samples`: a `Preview` per sample of one rollout of the first training question. Raises `MissingError` where the
    model is not on this machine, and `ConfigError` for a template or a tool that does not fit."""
    for model in recipe.policy_models.values():
        if model.checkpoint is None and model.name not in TINY_NAMES and find(model.name) is None:
            raise MissingError(f"{model.name} is not on this machine yet", f"agentrl models prepare {model.name}")
    task = load_tasks(recipe.data)[0] if recipe.data.path else Task("sample", QUESTION)
    samples, formats = asyncio.run(_scripted(_without_budgets(recipe), task))
    return {"samples": [_preview(sample, formats[sample.policy]) for sample in samples]}


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
    folders = {name: model_folder(model, name, recipe.run.dir) for name, model in recipe.policy_models.items()}
    formats = {name: ChatFormat.from_folder(folder) for name, folder in folders.items()}
    gate = Gate()
    reply = _script(recipe, tools)
    engine = ScriptedEngine.from_folders(reply, folders, gate=gate, max_model_len=window(recipe))
    session = Session(plan(LaunchConfig(gpus=0), detect()), folders, engine, gate, tools, formats)
    workflow = make_workflow(recipe, session)
    job = Job(task, 0, "preview", 0)
    [trajectory] = await run_jobs([job], workflow, engine=engine, gate=gate, tools=tools, max_concurrent=1)
    if trajectory.status == "failed":
        raise RunFailedError(f"the sample rollout failed: {trajectory.status_reason}", "raise the agents' budgets")
    scored = ScoredTrajectory(trajectory, Score(1.0), (None,) * len(trajectory.turns))
    return samples_of(recipe, scored), formats


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
        arguments = {key: _example(form) for key, form in _required(tools[name].parameters)}
        call = json.dumps({"name": name, "arguments": arguments, "purpose": purpose})
        return f"<tool_call>{call}</tool_call>"

    return reply


def _required(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    properties = schema.get("properties", {})
    return [(key, properties.get(key, {})) for key in schema.get("required", ())]


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that fits a small JSON schema."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items", {}))]
    if kind == "object":
        return {key: _example(form) for key, form in _required(schema)}
    return {"string": "key words", "integer": 1, "number": 1.0, "boolean": True}.get(kind)


def _preview(sample: Sample, format_: ChatFormat) -> Preview:
    parts: list[tuple[str, MaskReason | None]] = []
    at = 0
    for reason, run in groupby(sample.reasons):
        length = len(list(run))
        parts.append((format_.decode(sample.ids[at : at + length]), reason))
        at += length
    title = f"{sample.agent} on policy {sample.policy}: {len(sample.ids)} tokens, {sample.num_trained} trained"
    return Preview(title, tuple(parts))
