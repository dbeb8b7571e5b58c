"""Running workflows: order, limits, and failures carried as values."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.errors import EngineError
from agentrl.protocols import ToolItem, ToolResult
from agentrl.rollout.gate import Gate
from agentrl.rollout.runner import Context, Job, run_jobs
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import Prompt, Sampling, Task, Trajectory, Turn


def jobs(count: int, g: int = 1) -> list[Job]:
    return [Job(Task(f"t{i}", "q"), k, "train", 3) for i in range(count) for k in range(g)]


def finished(ctx: Context, answer: str | None = "a", **counts) -> Trajectory:
    return Trajectory(ctx.trajectory_id, ctx.job.task, ctx.job.g, ctx.turns, answer, "ok", counts=counts)


class Flow:
    """A workflow from a function."""

    def __init__(self, body) -> None:
        self.body = body

    async def run(self, task, ctx):
        return await self.body(task, ctx)


async def speak(ctx: Context, turn: int = 0, agent: int = 0, call: int = 0, bin: int = 0):
    request = ctx.request("p", agent, Prompt.of([10, 11]), Sampling(max_tokens=8), turn, call, bin)
    action = await ctx.act(f"agent{agent}", request, str)
    ctx.record(Turn(action, None, turn, agent, call, bin))
    return action


def run(
    body, todo, policy, *, reply=lambda request, text: "ok", tools=None, max_concurrent=8, deterministic=True, **kw
):
    async def main():
        gate = Gate()
        engine = ScriptedEngine(reply, {"p": policy}, gate=gate, deterministic=deterministic)
        try:
            out = await asyncio.wait_for(
                run_jobs(
                    todo, Flow(body), engine=engine, gate=gate, tools=tools or {}, max_concurrent=max_concurrent, **kw
                ),
                30,
            )
        finally:
            assert gate.live == gate.waiting == 0
            await engine.close()
        return out, engine

    return asyncio.run(main())


class SlowTool:
    name, description, parameters = "slow", "", {}

    def __init__(self, seconds: float = 0.0, fault: Exception | None = None) -> None:
        self.seconds, self.fault = seconds, fault

    async def call(self, arguments):
        await asyncio.sleep(self.seconds)
        if self.fault:
            raise self.fault
        return ToolResult(items=(ToolItem("h", str(arguments["x"])),))


def test_trajectories_come_back_in_job_order_whatever_finishes_first(scripted_policy):
    async def body(task, ctx):
        await asyncio.sleep(0.02 if task.id == "t0" else 0)
        await speak(ctx)
        return finished(ctx)

    seen = []
    out, _ = run(body, jobs(3, g=2), scripted_policy, on_trajectory=lambda t: seen.append(t.id), deterministic=False)
    assert [t.id for t in out] == [f"train-000003-t{i}-{k}" for i in range(3) for k in range(2)]
    assert sorted(seen) == sorted(t.id for t in out)
    assert seen != [t.id for t in out]


def test_a_workflow_that_raises_becomes_a_failed_trajectory_with_its_turns_in_order(scripted_policy):
    async def body(task, ctx):
        await speak(ctx, turn=1)
        await speak(ctx, turn=0)
        if task.id == "t1":
            raise KeyError("no such\nfact")
        return finished(ctx, distilled=2)

    out, _ = run(body, jobs(3), scripted_policy)
    assert [t.status for t in out] == ["ok", "failed", "ok"]
    assert out[1].status_reason == "KeyError: 'no such\\nfact'"
    assert out[1].answer is None
    assert [t.turn for t in out[1].turns] == [0, 1]
    assert out[1].counts["completions"] == 2
    assert out[0].counts == {"completions": 2, "generated_tokens": 6, "length_stops": 0, "distilled": 2}


def test_an_engine_fault_ends_the_run_and_cancels_the_rest(scripted_policy):
    cancelled = []

    async def body(task, ctx):
        if task.id == "t0":
            raise EngineError("gone", "restart")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(task.id)
            raise
        return finished(ctx)

    start = time.monotonic()
    with pytest.raises(EngineError, match="gone"):
        run(body, jobs(3), scripted_policy)
    assert sorted(cancelled) == ["t1", "t2"]
    assert time.monotonic() - start < 5


def test_cancelling_the_run_cancels_its_rollouts(scripted_policy):
    async def main():
        gate = Gate()
        engine = ScriptedEngine(lambda r, t: "ok", {"p": scripted_policy}, gate=gate, deterministic=True)

        async def body(task, ctx):
            await asyncio.sleep(60)

        task = asyncio.create_task(run_jobs(jobs(4), Flow(body), engine=engine, gate=gate, tools={}, max_concurrent=2))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert gate.live == 0

    asyncio.run(main())


def test_no_more_than_max_concurrent_run_at_once(scripted_policy):
    running, peak = 0, 0

    async def body(task, ctx):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002)
        await speak(ctx)
        running -= 1
        return finished(ctx)

    run(body, jobs(11), scripted_policy, max_concurrent=3)
    assert peak == 3
    with pytest.raises(ValueError, match="max_concurrent"):
        run(body, jobs(1), scripted_policy, max_concurrent=0)


def test_once_stopped_no_job_starts_and_the_running_ones_finish(scripted_policy):
    async def main():
        gate, stop = Gate(), asyncio.Event()
        engine = ScriptedEngine(lambda r, t: "ok", {"p": scripted_policy}, gate=gate, deterministic=True)

        async def body(task, ctx):
            await speak(ctx)
            stop.set()
            await speak(ctx, turn=1)
            return finished(ctx)

        out = await run_jobs(jobs(9), Flow(body), engine=engine, gate=gate, tools={}, max_concurrent=2, stop=stop)
        assert [t.task.id for t in out] == ["t0", "t1"]
        assert all(len(t.turns) == 2 for t in out)

    asyncio.run(main())


def test_no_jobs_give_no_trajectories(scripted_policy):
    assert run(None, [], scripted_policy)[0] == []


def test_tool_faults_are_results_and_counted(scripted_policy):
    tools = {
        "ok": SlowTool(),
        "late": SlowTool(5.0),
        "bad": SlowTool(fault=RuntimeError("disk\nfull")),
        "own": SlowTool(fault=TimeoutError("socket")),
    }
    results = {}

    async def body(task, ctx):
        for name in ("ok", "bad", "own", "absent"):
            results[name] = await ctx.call_tool(name, {"x": 1})
        results["late"] = await ctx.call_tool("late", {"x": 1}, timeout_s=0.01)
        return finished(ctx)

    (out,), _ = run(body, jobs(1), scripted_policy, tools=tools)
    assert results["ok"].error is None
    assert (results["bad"].error, results["bad"].items[0].text) == ("failed", "bad failed: RuntimeError: disk full")
    assert (results["own"].error, results["absent"].error) == ("failed", "unknown_tool")
    assert (results["late"].error, results["late"].items[0].text) == ("timeout", "late gave no result within 0.01 s")
    assert out.counts["tool_calls"] == 5
    assert out.counts["tool_errors"] == 4
    assert out.counts["tool_errors/timeout"] == 1


def test_a_tool_that_ends_the_engine_ends_the_run(scripted_policy):
    async def body(task, ctx):
        await ctx.call_tool("t", {})
        return finished(ctx)

    with pytest.raises(EngineError):
        run(body, jobs(1), scripted_policy, tools={"t": SlowTool(fault=EngineError("gone", "restart"))})


def test_the_context_builds_keys_from_the_job_and_the_place(scripted_policy):
    async def body(task, ctx):
        await ctx.generate("p", "reader", 2, Prompt.of([9]), Sampling(max_tokens=4), turn=5, call=1, bin=6)
        return finished(ctx)

    _, engine = run(body, jobs(1), scripted_policy)
    key = engine.requests[0].key
    assert (key.phase, key.step, key.task, key.g, key.turn, key.agent, key.call, key.bin) == (
        "train",
        3,
        "t0",
        0,
        5,
        2,
        1,
        6,
    )


def test_a_thousand_jobs_with_tools_and_concurrent_bins_run_in_canonical_batches(scripted_policy):
    async def body(task, ctx):
        for turn in range(3):
            await speak(ctx, turn=turn)
            await ctx.call_tool("slow", {"x": turn})
            await ctx.gather(*(speak(ctx, turn=turn, agent=1, bin=b) for b in range(1 + (turn + ctx.job.g) % 3)))
        return finished(ctx)

    todo = jobs(125, g=8)
    runs = [run(body, todo, scripted_policy, tools={"slow": SlowTool()}, max_concurrent=64) for _ in range(2)]
    out, engine = runs[0]
    assert len(out) == 1000
    assert all(t.status == "ok" and len(t.turns) == 3 + sum(1 + (i + t.g) % 3 for i in range(3)) for t in out)
    assert [r.key for r in engine.requests] == [r.key for r in runs[1][1].requests]
    assert out == runs[1][0]
