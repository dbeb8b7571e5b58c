"""A laboratory for teams: a real template, scripted voices, tools, and a coach that keeps what it was shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.models import prepare
from agentrl.protocols import CoachView, ToolItem, ToolResult
from agentrl.recipes.collect import Collected, collect, jobs_for
from agentrl.recipes.mappa.coaching import Coaching
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.setup import NoOutcome
from agentrl.recipes.mappa.workflow import TeamWorkflow
from agentrl.rollout.gate import Gate
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import Request, Score, ScoredTrajectory, Task

QUESTION = Task("q1", "What is six times seven?", ("REFERENCE42",))


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


@dataclass(slots=True)
class StubTool:
    """A tool that answers by a function, at once or after `wait_s`."""

    answer: Callable[[Mapping[str, Any]], ToolResult]
    name: str = "look"
    description: str = "look something up"
    wait_s: float = 0.0
    seen: list[Mapping[str, Any]] = field(default_factory=list)
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        await asyncio.sleep(self.wait_s)
        self.seen.append(arguments)
        return self.answer(arguments)


def told(text: str) -> ToolResult:
    return ToolResult((ToolItem("page", text),))


class WatchfulCoach:
    """Scores by a function of the view and keeps every view."""

    def __init__(self, rule: Callable[[CoachView], Score | float] = lambda view: 5.0, wait_s: float = 0.0) -> None:
        self.rule, self.wait_s = rule, wait_s
        self.views: list[CoachView] = []

    async def score(self, view: CoachView) -> Score:
        self.views.append(view)
        await asyncio.sleep(self.wait_s)
        value = self.rule(view)
        return value if isinstance(value, Score) else Score(value)

    def of(self, agent: str) -> list[CoachView]:
        return [view for view in self.views if view.agent == agent]


def recipe_of(agents: Mapping[str, Mapping[str, Any]], **sections: Any) -> MappaRecipe:
    """A team on tiny-llama, a policy of its own per agent unless it names one. `look` is a stub tool."""
    small = {"max_prompt_tokens": 2_000, "max_response_tokens": 3_000, "sampling": {"max_tokens": 900}}
    whole = {
        name: {"policy": name, "role": f"the {name} of the team", **small, **agent} for name, agent in agents.items()
    }
    base: dict[str, Any] = {
        "method": "mappa",
        "policies": {a["policy"]: {"name": "tiny-llama", "dtype": "float32"} for a in whole.values()},
        "agents": whole,
        "coach": {"kind": "constant", "value": 5.0},
        "tools": {"custom": {"look": "nowhere:look"}},
        "run": {"steps": 1},
    }
    return MappaRecipe.model_validate({**base, **sections})


Voice = str | Sequence[str] | Callable[[Request, str], str]


@dataclass(slots=True)
class Lab:
    """What a batch of rollouts did."""

    collected: Collected
    requests: list[Request]
    format: ChatFormat
    coach: WatchfulCoach
    recipe: MappaRecipe

    @property
    def only(self) -> ScoredTrajectory:
        assert len(self.collected.scored) == 1
        return self.collected.scored[0]

    def prompts(self, agent: str) -> list[str]:
        """The prompts of one agent in canonical order."""
        place = list(self.recipe.agents).index(agent)
        mine = sorted((r for r in self.requests if r.key.agent == place), key=lambda r: r.key)
        return [self.format.decode(r.prompt.ids) for r in mine]


@pytest.fixture
def roll(tiny):
    """(recipe, voices by agent, ...) -> Lab. A list of replies is by the agent's own turns, the last one repeating."""

    def run(
        recipe: MappaRecipe,
        voices: Mapping[str, Voice],
        tools: Sequence[Any] = (),
        *,
        coach: WatchfulCoach | None = None,
        tasks: Sequence[Task] = (QUESTION,),
        group_size: int = 1,
        latency_s: float = 0.0,
        reward: Any = None,
    ) -> Lab:
        names = list(recipe.agents)
        spoken: dict[tuple[Any, ...], int] = {}

        def reply(request: Request, prompt: str) -> str:
            voice = voices[names[request.key.agent]]
            if isinstance(voice, str):
                return voice
            if callable(voice):
                return voice(request, prompt)
            mine = (request.key.task, request.key.g, request.key.agent)
            spoken[mine] = spoken.get(mine, -1) + 1
            return voice[min(spoken[mine], len(voice) - 1)]

        format_ = ChatFormat.from_folder(tiny)
        watchful = coach or WatchfulCoach()

        async def main() -> tuple[Collected, list[Request]]:
            gate = Gate()
            engine = ScriptedEngine.from_folders(reply, dict.fromkeys(recipe.policy_models, tiny), gate=gate)
            engine._latency_s = latency_s
            by_name = {tool.name: tool for tool in (StubTool(lambda _: told("a page")), *tools)}
            coaching = Coaching(recipe, watchful)
            workflow = TeamWorkflow(recipe, {n: Chat(format_) for n in names}, by_name, watch=coaching.watch)
            session = SimpleNamespace(engine=engine, gate=gate, tools=by_name)
            done = await collect(
                session,
                jobs_for(tasks, group_size, "train", 1),
                workflow,
                reward or NoOutcome(),
                max_concurrent=64,
                score_actions=coaching.scores,
            )
            await coaching.close()
            await engine.close()
            return done, engine.requests

        collected, requests = asyncio.run(main())
        return Lab(collected, requests, format_, watchful, recipe)

    return run


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The functions of this file: test directories are no packages, so their modules import nothing of each other."""
    return SimpleNamespace(QUESTION=QUESTION, recipe=recipe_of, tool=StubTool, told=told, coach=WatchfulCoach)
