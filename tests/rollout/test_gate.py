"""The gate: a batch leaves when, and only when, every live coroutine waits."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import EngineError
from agentrl.rollout.gate import Gate
from agentrl.rollout.queue import GateQueue


class Recorder:
    """Answers each flush with its own items, and remembers the flushes."""

    def __init__(self, gate: Gate, full: int | None = None) -> None:
        self.flushes: list[list[str]] = []
        self.queue = GateQueue(gate, self.serve, full=full)

    async def serve(self, batch) -> None:
        self.flushes.append([p.item for p in batch])
        await asyncio.sleep(0)
        for pending in batch:
            pending.answer(pending.item)


async def within(coro, seconds: float = 5.0):
    return await asyncio.wait_for(coro, seconds)


def test_a_batch_waits_for_a_coroutine_inside_a_tool_call():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter(2)

        async def fast():
            await recorder.queue.submit("fast")
            gate.leave()

        async def slow():
            await asyncio.sleep(0.05)  # a tool call: live, not waiting
            await recorder.queue.submit("slow")
            gate.leave()

        await within(asyncio.gather(fast(), slow()))
        assert recorder.flushes == [["fast", "slow"]]

    asyncio.run(main())


def test_leaving_releases_the_batch_of_those_who_wait():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter(2)
        asker = asyncio.create_task(recorder.queue.submit("a"))
        await asyncio.sleep(0.02)
        assert recorder.flushes == []
        gate.leave()
        await within(asker)
        gate.leave()
        assert gate.live == gate.waiting == 0

    asyncio.run(main())


def test_children_of_gather_form_one_batch_while_their_parent_does_not_count():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter()
        results = await within(gate.gather(*(recorder.queue.submit(str(i)) for i in range(5))))
        assert results == [str(i) for i in range(5)]
        assert recorder.flushes == [["0", "1", "2", "3", "4"]]
        assert gate.live == 1

    asyncio.run(main())


def test_nothing_leaves_between_the_last_child_and_its_parent():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter(2)

        async def parent():
            async def child():
                await recorder.queue.submit("child")

            await gate.gather(child())
            await recorder.queue.submit("parent")
            gate.leave()

        async def other():
            await recorder.queue.submit("other 1")
            await recorder.queue.submit("other 2")
            gate.leave()

        await within(asyncio.gather(parent(), other()))
        assert [sorted(f) for f in recorder.flushes] == [["child", "other 1"], ["other 2", "parent"]]

    asyncio.run(main())


def test_nested_gathers_do_not_deadlock():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter()

        async def inner(name):
            await gate.gather(*(recorder.queue.submit(f"{name}{i}") for i in range(2)))
            return await recorder.queue.submit(name)

        assert await within(gate.gather(inner("x"), inner("y"), recorder.queue.submit("z"))) == ["x", "y", "z"]
        assert gate.live == 1
        assert gate.waiting == 0

    asyncio.run(main())


def test_gather_awaits_the_siblings_and_raises_the_first_fault_in_argument_order():
    async def main():
        gate = Gate()
        gate.enter()
        seen = []

        async def fail(text, delay):
            await asyncio.sleep(delay)
            raise ValueError(text)

        async def work():
            await asyncio.sleep(0.03)
            seen.append("done")

        with pytest.raises(ValueError, match="first"):
            await within(gate.gather(fail("first", 0.02), fail("second", 0), work()))
        assert seen == ["done"]
        assert gate.live == 1

    asyncio.run(main())


def test_an_engine_fault_cancels_the_siblings():
    async def main():
        gate = Gate()
        gate.enter()

        async def fail():
            raise EngineError("gone", "restart")

        with pytest.raises(EngineError):
            await within(gate.gather(asyncio.sleep(60), fail()))
        assert gate.live == 1

    asyncio.run(main())


def test_cancelling_a_parent_cancels_its_children_and_frees_their_places():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter(2)  # somebody else is live, so nothing leaves

        async def parent():
            try:
                await gate.gather(recorder.queue.submit("a"), recorder.queue.submit("b"))
            finally:
                gate.leave()

        task = asyncio.create_task(parent())
        await asyncio.sleep(0.01)
        assert gate.waiting == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(task)
        assert (gate.live, gate.waiting) == (1, 0)
        assert recorder.flushes == []

    asyncio.run(main())


def test_a_full_batch_leaves_early_only_when_allowed():
    async def main(full, expected):
        gate = Gate()
        recorder = Recorder(gate, full=full)
        gate.enter(3)
        tasks = [asyncio.create_task(recorder.queue.submit(str(i))) for i in range(2)]
        await asyncio.sleep(0.02)
        assert len(recorder.flushes) == expected
        gate.leave()
        await within(asyncio.gather(*tasks))

    asyncio.run(main(2, 1))
    asyncio.run(main(None, 0))


def test_a_server_that_breaks_refuses_all_requests_now_and_later():
    async def main():
        gate = Gate()

        async def serve(batch):
            raise RuntimeError("out of memory")

        queue = GateQueue(gate, serve)
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            await within(queue.submit("a"))
        with pytest.raises(EngineError):
            await within(queue.submit("b"))

    asyncio.run(main())


def test_closing_refuses_those_who_wait():
    async def main():
        gate = Gate()
        recorder = Recorder(gate)
        gate.enter(2)
        task = asyncio.create_task(recorder.queue.submit("a"))
        await asyncio.sleep(0)
        assert await recorder.queue.close()
        assert not await recorder.queue.close()
        with pytest.raises(EngineError, match="closed"):
            await within(task)

    asyncio.run(main())
