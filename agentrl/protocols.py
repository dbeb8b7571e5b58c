"""The few shapes that have more than one implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentrl.types import Completion, Request, Score, Task, Trajectory


@dataclass(frozen=True, slots=True)
class WeightSource:
    """New weights for an engine: a folder in Hugging Face layout, or tensors by parameter name (in process)."""

    folder: Path | None = None
    tensors: Mapping[str, Any] | None = None


class Engine(Protocol):
    """Produces completions. Prompts in and ids out are token ids; nothing is decoded on the way."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `EngineError` when the engine cannot serve at all."""
        ...

    async def load_weights(self, policy: str, version: int, source: WeightSource) -> int:
        """Replace a policy's weights, drop stale caches, and return the version that the engine now serves."""
        ...

    async def close(self) -> None:
        """Release everything; no process is left behind. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class ToolItem:
    """One raw result: a page, a paper, a program's output. `header` names its source."""

    header: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The raw results of one call. `error` names a fault the model is told of, in `items`' text."""

    items: tuple[ToolItem, ...] = ()
    error: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Tool(Protocol):
    """Something an agent may call. Arguments were checked against `parameters` (a JSON schema) before."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult: ...


class Reward(Protocol):
    """Sees the end of a trajectory."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score: ...


@dataclass(frozen=True, slots=True)
class CoachView:
    """Everything a coach may see of one action: role, exact input, output, and what the environment replied."""

    task: Task
    agent: str
    role: str
    observed: str
    action: str
    feedback: str | None
    ledger: Mapping[str, Any] = field(default_factory=dict)
    ground_truth: str | None = None


class Coach(Protocol):
    async def score(self, view: CoachView) -> Score: ...


class Tracker(Protocol):
    """Receives each step's metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
