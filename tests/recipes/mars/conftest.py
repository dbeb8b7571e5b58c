"""A laboratory for MARS: real chat templates, scripted voices, stub tools, and samples as training sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.models import prepare
from agentrl.protocols import ToolItem, ToolResult
from agentrl.recipes.collect import jobs_for
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.workflow import MarsWorkflow
from agentrl.rollout.gate import Gate
from agentrl.rollout.runner import run_jobs
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import (
    Completion,
    Key,
    MaskReason,
    Request,
    Sample,
    Score,
    ScoredTrajectory,
    Span,
    Task,
    Trajectory,
)
from agentrl.update.samples import to_samples

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
ENDS = {
    "chatml": "<|im_end|>",
    "thinking": "<|im_end|>",
    "newline_between": "<|im_end|>",
    "headers": "<|eot_id|>",
    "inst": "</s>",
    "model_turns": "<end_of_turn>",
    "plain_marker": "</s>",
}
MORE_SPECIAL = ["<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
MORE_SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]
QUESTION = Task("q1", "Where is the river?", ("north",))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of tiny-llama, weights included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(tmp_path_factory.mktemp("home")))
        return prepare("tiny-llama")


@pytest.fixture(scope="session")
def folder_of(tiny, tmp_path_factory) -> Callable[[str], Path]:
    """Template fixture -> a model folder that speaks it (no weights)."""
    made: dict[str, Path] = {}

    def make(template: str) -> Path:
        if template not in made:
            folder = tmp_path_factory.mktemp(template)
            tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
            tokenizer.add_special_tokens(MORE_SPECIAL)
            tokenizer.save(str(folder / "tokenizer.json"))
            end = tokenizer.token_to_id(ENDS[template])
            special = {"bos_token": "<s>", "eos_token": ENDS[template], "pad_token": "<|endoftext|>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(special))
            (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
            (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text("utf-8"))
            made[template] = folder
        return made[template]

    return make


@pytest.fixture(params=sorted(ENDS))
def template(request) -> str:
    return request.param


@dataclass(slots=True)
class StubTool:
    """A tool that answers by a function; `seen` holds the arguments of every execution."""

    answer: Callable[[Mapping[str, Any]], ToolResult]
    name: str = "search"
    description: str = "find pages"
    seen: list[Mapping[str, Any]] = field(default_factory=list)
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.seen.append(arguments)
        return self.answer(arguments)


def pages(*texts: str) -> ToolResult:
    return ToolResult(tuple(ToolItem(f"page {i}", text) for i, text in enumerate(texts)))


def page_tool(*texts: str, name: str = "search") -> StubTool:
    return StubTool(lambda _: pages(*texts), name)


def call(query: str = "river", purpose: str | None = "find where it is", name: str = "search") -> str:
    """A Hermes call as System 2 would write it."""
    body: dict[str, Any] = {"name": name, "arguments": {"query": query}}
    if purpose is not None:
        body["purpose"] = purpose
    return f"<tool_call>{json.dumps(body)}</tool_call>"


ANSWER = "<answer>north</answer>"


def script(system2: Sequence[str] | Callable[[Request, str], str], system1: Any = "a digest"):
    """A reply function: System 2's replies by turn (the last one repeats), System 1's text or function."""

    def reply(request: Request, prompt: str) -> str:
        voice = system1 if request.key.agent else system2
        if callable(voice):
            return voice(request, prompt)
        return voice if isinstance(voice, str) else voice[min(request.key.turn, len(voice) - 1)]

    return reply


def recipe_of(mars: Mapping[str, Any] | None = None, **sections: Any) -> MarsRecipe:
    """A recipe on tiny-llama; System 2's and System 1's limits are small unless given."""
    agents = sections.pop("agents", {})
    small: dict[str, Any] = {
        SYSTEM2: {"max_prompt_tokens": 900, "max_response_tokens": 1200, "sampling": {"max_tokens": 1200}},
        SYSTEM1: {"max_prompt_tokens": 600, "max_response_tokens": 120, "sampling": {"max_tokens": 120}},
    }
    merged = {name: {**small[name], **agents.get(name, {})} for name in small}
    base: dict[str, Any] = {
        "method": "mars",
        "model": {"name": "tiny-llama", "dtype": "float32"},
        "run": {"steps": 2},
        "mars": {"answer_reserve": 60, **(mars or {})},
        "tools": {"custom": {"search": "nowhere:search"}},
    }
    return MarsRecipe.model_validate({**base, **sections, "agents": merged})


@dataclass(slots=True)
class Lab:
    """What a batch of rollouts did."""

    trajectories: list[Trajectory]
    requests: list[Request]
    recipe: MarsRecipe
    chat: Chat
    workflow: MarsWorkflow

    @property
    def only(self) -> Trajectory:
        assert len(self.trajectories) == 1
        return self.trajectories[0]

    def asked(self, agent: int) -> list[Request]:
        """Requests of one role, in canonical order."""
        return sorted((r for r in self.requests if r.key.agent == agent), key=lambda r: r.key)

    def prompts(self, agent: int) -> list[str]:
        return [self.chat.format.decode(r.prompt.ids) for r in self.asked(agent)]

    def seen_by_system2(self) -> str:
        """Everything that ever stood in a System 2 context."""
        return "\n".join(self.prompts(0))


EngineOf = Callable[[ScriptedEngine], Any]


@pytest.fixture
def roll(folder_of):
    """(script, tools, ...) -> Lab: rollouts on the scripted engine with a real template."""

    def run(
        reply: Callable[[Request, str], str],
        tools: Sequence[Any] = (),
        *,
        recipe: MarsRecipe | None = None,
        mars: Mapping[str, Any] | None = None,
        agents: Mapping[str, Any] | None = None,
        template: str = "chatml",
        tasks: Sequence[Task] = (QUESTION,),
        group_size: int = 1,
        latency_s: float = 0.0,
        wrap: EngineOf | None = None,
        tool_timeout_s: float = 60.0,
        raw: bool = False,
    ) -> Lab:
        """`newline_between` opens the thinking in its generation prompt: replies close it, but for `raw`."""
        recipe = recipe or recipe_of(mars, agents=agents or {})
        folder = folder_of(template)
        format_ = ChatFormat.from_folder(folder)
        by_name = {tool.name: tool for tool in tools}
        chats = {SYSTEM2: Chat(format_), SYSTEM1: Chat(format_, enable_thinking=False)}
        workflow = MarsWorkflow(recipe, chats, by_name)

        async def main() -> tuple[list[Trajectory], list[Request]]:
            gate = Gate()
            names = {a.policy for a in recipe.agents.values()}
            closing = template == "newline_between" and not raw
            spoken = (lambda r, p: f"hm\n</think>\n\n{reply(r, p)}") if closing else reply
            inner = ScriptedEngine.from_folders(spoken, dict.fromkeys(names, folder), gate=gate)
            inner._latency_s = latency_s
            engine = inner if wrap is None else wrap(inner)
            done = await run_jobs(
                jobs_for(tasks, group_size, "train", 1),
                workflow,
                engine=engine,
                gate=gate,
                tools=by_name,
                max_concurrent=32,
                tool_timeout_s=tool_timeout_s,
            )
            await inner.close()
            return done, inner.requests

        trajectories, requests = asyncio.run(main())
        return Lab(trajectories, requests, recipe, chats[SYSTEM2], workflow)

    return run


def scored(trajectory: Trajectory, reward: float | None) -> ScoredTrajectory:
    return ScoredTrajectory(trajectory, Score(reward, None if reward is not None else "lost"), ())


def samples_of(trajectory: Trajectory, reward: float | None = 1.0, frozen: Sequence[str] = ()) -> list[Sample]:
    def fate(agent: str) -> MaskReason | None:
        return MaskReason.FROZEN if agent in frozen else None

    return to_samples(scored(trajectory, reward), part_of=str, fate_of=fate, constrained="allowed")


def sample(
    role: str = SYSTEM2,
    reward: float | None = 1.0,
    *,
    group: str = "q",
    rollout: int = 0,
    place: int = 0,
    trained: int = 2,
    reason: MaskReason | None = None,
) -> Sample:
    """A synthetic sample: two prompt tokens, then `trained` sampled ones (masked by `reason` or a missing reward)."""
    if reward is None:
        reason = MaskReason.REWARD_MISSING
    reasons = (MaskReason.PROMPT,) * 2 + (reason,) * trained
    return Sample(
        id=f"{group}-{rollout}/{place:03d}",
        trajectory_id=f"{group}-{rollout}",
        group=group,
        agent=role,
        part=role,
        policy="policy",
        policy_version=0,
        ids=tuple(range(3, 5 + trained)),
        reasons=reasons,
        behaviour=(0.0,) * (2 + trained),
        constrained=(False,) * (2 + trained),
        spans=(Span(2, 2 + trained, 0, 1.0),),
        score=Score(reward, None if reward is not None else "lost"),
    )


def question(
    rewards: Sequence[float | None], distilled: Sequence[int], group: str = "q", trained: int = 2
) -> list[Sample]:
    """One System 2 sample per rollout and `distilled[k]` System 1 samples of rollout k."""
    out = []
    for k, (reward, num) in enumerate(zip(rewards, distilled, strict=True)):
        out.append(sample(SYSTEM2, reward, group=group, rollout=k, trained=trained))
        out += [sample(SYSTEM1, reward, group=group, rollout=k, place=1 + j, trained=trained) for j in range(num)]
    return out


class Shuffled:
    """An engine that completes concurrent requests in a shuffled order, and keeps that order."""

    def __init__(self, inner: ScriptedEngine, rng: Any, order: list[Key]) -> None:
        self.inner, self.rng, self.order = inner, rng, order

    async def generate(self, request: Request) -> Completion:
        completion = await self.inner.generate(request)
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        self.order.append(request.key)
        return completion


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The functions of this file: test directories are no packages, so their modules import nothing of each other."""
    return SimpleNamespace(
        QUESTION=QUESTION,
        ANSWER=ANSWER,
        call=call,
        script=script,
        pages=pages,
        page_tool=page_tool,
        tool=StubTool,
        recipe=recipe_of,
        samples=samples_of,
        scored=scored,
        sample=sample,
        question=question,
        Shuffled=Shuffled,
    )
