"""Runs workflows: many rollouts at once, each an ordinary coroutine, failures carried as values.

A workflow is `async def run(task, ctx) -> Trajectory`. What it raises becomes a failed trajectory with the turns it
had recorded; only the end of the engine, an interrupt or a cancellation ends the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl.errors import EngineError
from agentrl.protocols import Engine, Tool, ToolItem, ToolResult
from agentrl.rollout.gate import Gate
from agentrl.types import Action, Completion, Key, Prompt, Request, Sampling, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to run: the `g`-th of a task, in a phase ("train", "eval") at a step."""

    task: Task
    g: int
    phase: str
    step: int

    @property
    def trajectory_id(self) -> str:
        return f"{self.phase}-{self.step:06d}-{self.task.id}-{self.g}"


class Context:
    """What a workflow may do. One per job; `counts` gathers its counters, `turns` the turns recorded so far."""

    def __init__(
        self, job: Job, engine: Engine, gate: Gate, tools: Mapping[str, Tool], *, tool_timeout_s: float = 60.0
    ) -> None:
        self.job = job
        self.engine = engine
        self.gate = gate
        self.tools = tools
        self.tool_timeout_s = tool_timeout_s
        self.counts: Counter[str] = Counter()
        self._turns: list[Turn] = []

    @property
    def trajectory_id(self) -> str:
        return self.job.trajectory_id

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The recorded turns in canonical order."""
        return tuple(sorted(self._turns, key=lambda turn: turn.order))

    def record(self, turn: Turn) -> None:
        """Keep a finished turn, so that a later failure does not lose it."""
        self._turns.append(turn)

    def request(
        self,
        policy: str,
        agent_index: int,
        prompt: Prompt,
        sampling: Sampling,
        turn: int,
        call: int = 0,
        bin: int = 0,
    ) -> Request:
        """The request of this place in the rollout, with the key that seeds it."""
        job = self.job
        key = Key(job.phase, job.step, job.task.id, job.g, turn, agent_index, call, bin)
        return Request(policy, prompt, sampling, key)

    async def generate(
        self,
        policy: str,
        agent: str,
        agent_index: int,
        prompt: Prompt,
        sampling: Sampling,
        turn: int,
        call: int = 0,
        bin: int = 0,
    ) -> Completion:
        """One completion by `agent`. Raises `PromptTooLongError` when the prompt leaves no room in the window."""
        request = self.request(policy, agent_index, prompt, sampling, turn, call, bin)
        return (await self.act(agent, request, _no_text)).completion

    async def act(self, agent: str, request: Request, decode: Callable[[Sequence[int]], str]) -> Action:
        """One action: the completion of `request` by `agent`, with its decoded text."""
        completion = await self.engine.generate(request)
        self.counts["completions"] += 1
        self.counts["generated_tokens"] += len(completion.ids)
        self.counts["length_stops"] += completion.finish_reason == "length"
        return Action(agent, request, completion, decode(completion.ids))

    async def gather(self, *coros: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run coroutines of this rollout concurrently; results in argument order. See `Gate.gather`."""
        return await self.gate.gather(*coros)

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float | None = None, tool: Tool | None = None
    ) -> ToolResult:
        """Call a tool. An unknown name, a timeout and whatever the tool raises come back as a result with `error`
        set ("unknown_tool", "timeout", "failed") and the reason as its text. Counts `tool_calls`, `tool_errors`.

        `tool` is called in place of the one of that name: a tool that is bound to something of this rollout.
        """
        limit = self.tool_timeout_s if timeout_s is None else timeout_s
        self.counts["tool_calls"] += 1
        result = await self._call(name, tool or self.tools.get(name), arguments, limit)
        if result.error is not None:
            self.counts["tool_errors"] += 1
            self.counts[f"tool_errors/{result.error}"] += 1
        return result

    async def _call(self, name: str, tool: Tool | None, arguments: Mapping[str, Any], limit: float) -> ToolResult:
        if tool is None:
            return _fault(name, "unknown_tool", f"there is no tool {name!r}; tools: {', '.join(sorted(self.tools))}")
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                return await tool.call(arguments)
        except EngineError:
            raise
        except TimeoutError as error:
            if deadline.expired():
                return _fault(name, "timeout", f"{name} gave no result within {limit:g} s")
            return _fault(name, "failed", f"{name} failed: {_described(error)}")
        except Exception as error:  # noqa: BLE001 - a tool's fault is the model's observation, not the run's end
            return _fault(name, "failed", f"{name} failed: {_described(error)}")


class Workflow(Protocol):
    """Who speaks when. Ordinary control flow; concurrency within a rollout goes through `ctx.gather`."""

    async def run(self, task: Task, ctx: Context) -> Trajectory: ...


async def run_jobs(
    jobs: Sequence[Job],
    workflow: Workflow,
    *,
    engine: Engine,
    gate: Gate,
    tools: Mapping[str, Tool],
    max_concurrent: int,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    stop: asyncio.Event | None = None,
    tool_timeout_s: float = 60.0,
) -> list[Trajectory]:
    """Run all jobs, at most `max_concurrent` at once, and return their trajectories in job order.

    `on_trajectory` is called as each finishes. Once `stop` is set no further job starts; those that run finish, and
    only finished ones are returned. A context's counts are added to its trajectory's, the workflow's own winning.
    Raises `EngineError` (and whatever `on_trajectory` raises) after cancelling the rest.
    """
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent is {max_concurrent}; it must be at least 1")
    queue = iter(enumerate(jobs))
    finished: dict[int, Trajectory] = {}

    async def work() -> None:
        # A worker keeps its place in the gate between jobs, so a batch never leaves short of the next job.
        try:
            for index, job in queue:
                if stop is not None and stop.is_set():
                    return
                ctx = Context(job, engine, gate, tools, tool_timeout_s=tool_timeout_s)
                finished[index] = await _run_one(job, workflow, ctx)
                if on_trajectory is not None:
                    on_trajectory(finished[index])
        finally:
            gate.leave()

    num_workers = min(max_concurrent, len(jobs))
    gate.enter(num_workers)
    workers = [asyncio.create_task(work()) for _ in range(num_workers)]
    if workers:
        await _all_or_first_fault(workers)
    return [finished[index] for index in sorted(finished)]


async def _all_or_first_fault(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all. At the first exception, or when cancelled, cancel and await the rest."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
    for task in tasks:
        if task in done:
            task.result()


async def _run_one(job: Job, workflow: Workflow, ctx: Context) -> Trajectory:
    try:
        trajectory = await workflow.run(job.task, ctx)
    except EngineError:
        raise
    except Exception as error:  # noqa: BLE001 - a failed rollout is a value; the group goes on without it
        trajectory = Trajectory(
            id=job.trajectory_id,
            task=job.task,
            g=job.g,
            turns=ctx.turns,
            answer=None,
            status="failed",
            status_reason=_described(error),
        )
    return replace(trajectory, counts={**ctx.counts, **trajectory.counts})


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _fault(tool: str, error: str, text: str) -> ToolResult:
    return ToolResult(items=(ToolItem(tool, text),), error=error)


def _no_text(_: Sequence[int]) -> str:
    return ""
