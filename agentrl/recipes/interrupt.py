"""Ctrl-C once: finish the step, save, stop. Twice, or SIGTERM: stop now. Nothing is left behind either way."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130
_GRACE_S = 2.0  # a wrapper may send the same signal twice


class Interrupt:
    """`requested` is true after the first signal; the loop looks at it between steps.

    To stop now, the handler raises `KeyboardInterrupt` once, wherever the main thread is: within torch's own code as
    soon as it returns, within the event loop at once. `asyncio.run` then cancels its tasks, and these close what they
    opened. A signal during that is ignored for 2 s, lest it cuts the closing short; later it ends the process on the
    spot, and the guards of `agentrl.launch.guard` end what it leaves.

    `arrived` gets a byte per signal from Python's C handler (`signal.set_wakeup_fd`): while the main thread is in
    torch, two signals are one call of this handler.
    """

    def __init__(self, note: Callable[[str], None], arrived: socket.socket, *, finish_step: bool) -> None:
        self.requested = False
        self._note = note
        self._arrived = arrived
        self._finish_step = finish_step
        self._stopped_at: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopped_at is not None:
            if time.monotonic() - self._stopped_at > _GRACE_S:
                os._exit(EXIT_CODE)
            return
        arrived = [number]
        with contextlib.suppress(BlockingIOError):
            arrived = list(self._arrived.recv(4096))
        again = self.requested or arrived.count(signal.SIGINT) > 1
        stop = again or signal.SIGTERM in (number, *arrived) or not self._finish_step
        self.requested = True
        if stop:
            self._stopped_at = time.monotonic()
        # The signal may come in the middle of another write to the same stream, which then refuses this one.
        with contextlib.suppress(RuntimeError):
            self._note("stopping now" if stop else "stopping after this step; Ctrl-C again stops now")
        if stop:
            raise KeyboardInterrupt


@contextmanager
def interruptible(note: Callable[[str], None], *, finish_step: bool = False) -> Iterator[Interrupt]:
    """Within the block SIGINT and SIGTERM behave as above; without `finish_step` the first Ctrl-C stops at once. Only
    the main thread may open it."""
    with contextlib.ExitStack() as undo:
        told, arrived = (undo.enter_context(end) for end in socket.socketpair())
        told.setblocking(False)
        arrived.setblocking(False)
        interrupt = Interrupt(note, arrived, finish_step=finish_step)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False))
        for number in (signal.SIGINT, signal.SIGTERM):
            undo.callback(signal.signal, number, signal.signal(number, interrupt.on_signal))
        yield interrupt
