"""Ctrl-C once: finish the step, save, stop. Twice, or SIGTERM: stop now. Nothing is left behind either way."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """`requested` is true after the first Ctrl-C."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self._note = note

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested or number == signal.SIGTERM:
            raise KeyboardInterrupt
        self.requested = True
        self._note("stopping after this step; Ctrl-C again stops now")


@contextmanager
def interruptible(note: Callable[[str], None]) -> Iterator[Interrupt]:
    """Within the block SIGINT and SIGTERM behave as above. Only the main thread may open it."""
    interrupt = Interrupt(note)
    before = {s: signal.signal(s, interrupt.on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
