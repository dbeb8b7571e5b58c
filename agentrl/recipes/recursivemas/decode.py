"""The only text of a run: what the decoder samples from its last prompt, latents in their slots.

Through the hf engine on the model that also thought, so nothing is loaded twice, or through vLLM (see `vllm_decode`).
Where the recipe gives the decoder tools, it calls them here and only here (see `tool_loop`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from agentrl.config.schema import EngineConfig, SamplingConfig
from agentrl.protocols import Tool
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import Loaded
from agentrl.recipes.recursivemas.tool_loop import Said, ToolLoop
from agentrl.recipes.recursivemas.vllm_decode import VLLMDecode
from agentrl.recipes.session import chosen, make_tools, refuse_open_sandbox
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf import HFEngine
from agentrl.types import Action, Key, Prompt, Request, Sampling, Task

AnswerKind = Literal["boxed", "choice", "code", "short"]
_CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Z])\)?(?:[.:)\s]|$)")


class Decoder:
    """Answers prompts in the role of the graph's decoder."""

    def __init__(
        self,
        recipe: RecursiveRecipe,
        loaded: Loaded,
        engine: HFEngine | VLLMDecode,
        gate: Gate,
        tools: Mapping[str, Tool],
    ) -> None:
        self._graph = loaded.system.graph
        self._policy = recipe.agents[self._graph.decoder].policy
        self._sampling = sampling_of(recipe.decoder.sampling)
        self._rounds = recipe.recursivemas.rounds
        self._engine, self._gate = engine, gate
        agent = loaded.system.agents[self._graph.decoder]
        self._format = agent.chat.format
        self._loop: ToolLoop | None = None
        if tools:
            window = min(agent.backbone.window, recipe.engine.max_model_len or agent.backbone.window)
            self._loop = ToolLoop(tools, recipe.recursivemas.tool_loop, self._format, window)

    @property
    def computed(self) -> int:
        """Forward positions that answers have cost so far: no padding, a beginning that a batch shares counts once."""
        return self._engine.computed[self._policy]

    def limited(self, max_tokens: int) -> Decoder:
        """The same decoder with shorter answers."""
        short = copy.copy(self)
        short._sampling = replace(self._sampling, max_tokens=min(max_tokens, self._sampling.max_tokens))
        return short

    async def answer(self, tasks: Sequence[Task], prompts: Sequence[Prompt], phase: str, g: int = 0) -> list[Said]:
        """One answer per task. Raises `PromptTooLongError` for a prompt that fills the window."""
        name = self._graph.decoder
        place = self._graph.agents.index(name)
        requests = [
            Request(self._policy, prompt, self._sampling, Key(phase, 0, task.id, g, self._rounds, place))
            for task, prompt in zip(tasks, prompts, strict=True)
        ]
        return await self._gate.gather(*(self._answer(name, request) for request in requests))

    async def _answer(self, name: str, request: Request) -> Said:
        if self._loop is not None:
            return await self._loop.answer(self._engine.generate, name, request)
        completion = await self._engine.generate(request)
        return Said((Action(name, request, completion, self._format.decode_completion(completion.ids)),))


@asynccontextmanager
async def open_decoder(recipe: RecursiveRecipe, loaded: Loaded) -> AsyncIterator[Decoder]:
    """The decoder on an engine that serves its model alone, closed in every way the body can end.

    Raises `MissingError` where the recipe's Python tool cannot be isolated, and as the engine's start.
    """
    gate = Gate()
    tools = chosen(make_tools(recipe), recipe.decoder.tools)
    await refuse_open_sandbox(tools)
    engine = await _open_engine(recipe, loaded, gate)
    try:
        yield Decoder(recipe, loaded, engine, gate, tools)
    finally:
        await engine.close()


async def _open_engine(recipe: RecursiveRecipe, loaded: Loaded, gate: Gate) -> HFEngine | VLLMDecode:
    policy = recipe.decoder.policy
    if recipe.engine.kind == "vllm":
        return await VLLMDecode.start(recipe, loaded.system.agents[loaded.system.graph.decoder].backbone)
    return HFEngine({policy: loaded.policies[policy]}, seed=recipe.run.seed, gate=gate, **_options(recipe.engine))


def _options(engine: EngineConfig) -> dict[str, Any]:
    return {
        "deterministic": engine.deterministic,
        "max_batch": engine.max_batch,
        "max_model_len": engine.max_model_len,
    }


def sampling_of(config: SamplingConfig) -> Sampling:
    return Sampling(config.temperature, config.top_p, config.top_k, config.max_tokens)


def answer_of(kind: AnswerKind, text: str) -> str | None:
    r"""The answer in a decoder's text; None where there is none in the form that was asked for.

    boxed: what stands in the last \boxed{}; choice: the letter in it; code: the last Python block, cut off or not;
    short: the whole text.
    """
    if kind == "short":
        return text.strip() or None
    if kind == "code":
        blocks = _CODE.findall(text if text.count("```") % 2 == 0 else text + "\n```")
        return blocks[-1].strip() or None if blocks else None
    boxed = _last_boxed(text)
    if boxed is None or kind == "boxed":
        return boxed
    letter = _LETTER.match(boxed.removeprefix(r"\text{").strip("} "))
    return letter[1] if letter else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip() or None
    return None
