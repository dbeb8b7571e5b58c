"""The queue in front of a batching engine: who waits, when a batch leaves, and who is told if it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentrl.errors import EngineError
from agentrl.rollout.gate import Gate
from agentrl.types import Completion

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Pending(Generic[Item]):
    """One queued item and the future of its completion."""

    item: Item
    future: asyncio.Future[Completion]

    def answer(self, completion: Completion) -> None:
        if not self.future.done():
            self.future.set_result(completion)

    def refuse(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class GateQueue(Generic[Item]):
    """Collects items until the gate is ready, or until `full` of them wait, then hands all to `serve` in one task.

    `serve` answers or refuses every pending it got; an `EngineError` that it raises is the end: it refuses what is
    left, now and later. Belongs to one event loop.
    """

    def __init__(
        self,
        gate: Gate,
        serve: Callable[[list[Pending[Item]]], Coroutine[Any, Any, None]],
        *,
        full: int | None = None,
    ) -> None:
        self._gate = gate
        self._serve = serve
        self._full = full
        self._pending: dict[Pending[Item], None] = {}
        self._flights: set[asyncio.Task[None]] = set()
        self._planned = False
        self._fault: EngineError | None = None
        self._closed = False
        gate.add_listener(self._plan)

    async def submit(self, item: Item) -> Completion:
        """Wait for the item's completion. Raises `EngineError` once the engine is closed or broken."""
        self.check_serving()
        pending: Pending[Item] = Pending(item, asyncio.get_running_loop().create_future())
        self._pending[pending] = None
        self._gate.begin_wait()
        try:
            return await pending.future
        finally:
            if pending in self._pending:
                del self._pending[pending]
                self._gate.end_wait()

    def check_serving(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise EngineError("the engine is closed", "make a new engine")

    async def close(self) -> bool:
        """Refuse what waits and let what runs end. Returns False when it was closed before."""
        if self._closed:
            return False
        self._closed = True
        self._gate.remove_listener(self._plan)
        fault = EngineError("the engine was closed while requests waited", "end the rollouts before closing it")
        _refuse(self._take(), fault)
        if self._flights:
            await asyncio.wait(tuple(self._flights))
        return True

    def _plan(self) -> None:
        # In the loop's next turn: coroutines that are about to ask join the batch first.
        if not self._planned and self._pending and self._may_leave():
            self._planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _may_leave(self) -> bool:
        return self._gate.ready or (self._full is not None and self._gate.waiting >= self._full)

    def _flush(self) -> None:
        self._planned = False
        if self._pending and self._may_leave():
            flight = asyncio.get_running_loop().create_task(self._fly(self._take()))
            self._flights.add(flight)
            flight.add_done_callback(self._flights.discard)

    def _take(self) -> list[Pending[Item]]:
        taken = list(self._pending)
        self._pending.clear()
        if taken:
            self._gate.end_wait(len(taken))
        return taken

    async def _fly(self, batch: list[Pending[Item]]) -> None:
        try:
            await self._serve(batch)
        except EngineError as error:
            self._break(batch, error)
        except Exception as error:  # noqa: BLE001 - an unanswered request would hang its rollout for ever
            fault = EngineError(f"the engine broke: {type(error).__name__}: {error}", "see the trace with --debug")
            fault.__cause__ = error
            self._break(batch, fault)

    def _break(self, batch: list[Pending[Item]], fault: EngineError) -> None:
        self._fault = fault
        _refuse([*batch, *self._take()], fault)


def _refuse(batch: Iterable[Pending[Any]], error: EngineError) -> None:
    for pending in batch:
        pending.refuse(error)
