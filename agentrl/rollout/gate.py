"""The gate: knows when every live coroutine waits for the engine.

An in-process engine that batches must decide when a batch is complete. Timers make that a race; the gate counts
instead. A coroutine is *live* from `enter` to `leave`. It *waits* while the engine holds its request in the queue.
When `waiting >= live` nobody can add to the batch, so it may be flushed. A coroutine inside a tool call is live and
does not wait, so the engine waits for it. Requests in a running batch do not wait either: until they are answered
nothing else is flushed, which makes the content of each batch a function of the jobs alone.

Live coroutines must not wait for each other except through `gather`: an awaited lock held by a coroutine that waits
for the engine would never be released.

All methods belong to one event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.errors import EngineError


class Gate:
    """Counts live and waiting coroutines, and tells its listeners of each change."""

    def __init__(self) -> None:
        self._live = 0
        self._waiting = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def live(self) -> int:
        return self._live

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def ready(self) -> bool:
        """Whether a batch may be flushed: somebody waits, and nobody else could join."""
        return self._waiting > 0 and self._waiting >= self._live

    def enter(self, count: int = 1) -> None:
        """`count` coroutines become live. Enter all before the first of them runs, or a batch may leave too early."""
        self._live += count

    def leave(self, count: int = 1) -> None:
        assert self._live >= count, "more coroutines left the gate than entered it"
        self._live -= count
        self._changed()

    def begin_wait(self, count: int = 1) -> None:
        self._waiting += count
        self._changed()

    def end_wait(self, count: int = 1) -> None:
        assert self._waiting >= count, "more requests stopped waiting than waited"
        self._waiting -= count
        self._changed()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change that may have made the gate ready."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    async def gather(self, *coros: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run `coros` concurrently, each live, while the calling coroutine is not. Results in argument order.

        The caller's place passes to its children and comes back with the last of them, so the count never dips
        in between. If children raise, all are awaited and the first exception in argument order propagates; an
        `EngineError`, or cancelling the caller, cancels the others first.
        """
        if not coros:
            return []
        remaining = len(coros)
        self.enter(remaining - 1)

        def child_done(_: asyncio.Task[Any]) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining:
                self.leave()

        tasks = [asyncio.create_task(coro) for coro in coros]
        for task in tasks:
            task.add_done_callback(child_done)
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                if any(not t.cancelled() and isinstance(t.exception(), EngineError) for t in done):
                    break
        finally:
            unfinished = [t for t in tasks if not t.done()]
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished)
        failed = [t for t in tasks if t not in unfinished and (t.cancelled() or t.exception() is not None)]
        engine_faults = [t for t in failed if not t.cancelled() and isinstance(t.exception(), EngineError)]
        for task in engine_faults or failed:
            task.result()
        return [task.result() for task in tasks]

    def _changed(self) -> None:
        for listener in tuple(self._listeners):
            listener()
