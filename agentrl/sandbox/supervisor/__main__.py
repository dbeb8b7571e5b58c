"""The supervisor's protocol and its watch.

Standard input carries the request (8 bytes of length, JSON, the payload for `inside.py`) and stays open: its end
means that the caller is gone. Standard output carries the reply: 8 bytes of length, JSON, then the bytes of stdout,
stderr and each file. What the model's program prints is only ever a length-counted part of that reply.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any, NamedTuple

from results import collect
from staging import libc
from starting import RefusedError, SetupError, Started, start
from tree import breach, end_all

_TICK_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Ended(NamedTuple):
    status: str  # "ended" on its own, or the limit that ended it
    returncode: int
    wall_s: float
    out: bytes
    err: bytes


class _Output:
    """Both streams of the program, up to one cap on their sum."""

    def __init__(self, out: int, err: int, room: int) -> None:
        self.streams = {out: bytearray(), err: bytearray()}
        self.room = room
        self.flooded = False

    def take(self, fd: int) -> bool:
        """Read what is there; false at the end of the stream."""
        chunk = os.read(fd, min(65536, self.room + 1))
        self.flooded = self.flooded or len(chunk) > self.room
        self.streams[fd] += chunk[: self.room]
        self.room -= min(self.room, len(chunk))
        return bool(chunk)


def watch(started: Started, limits: dict[str, Any]) -> Ended:
    """Collect output and enforce every limit until the program ends; then nothing of it is alive."""
    begin = time.monotonic()
    output = _Output(started.out, started.err, limits["output_bytes"])
    pidfd = os.pidfd_open(started.pid)
    poll = select.poll()
    for fd in (*output.streams, pidfd):
        poll.register(fd, select.POLLIN)
    poll.register(0, select.POLLRDHUP)
    status, next_look = "", 0.0
    while not status:
        for fd, _ in poll.poll(_TICK_S * 1000):
            if fd in output.streams:
                if not output.take(fd):
                    poll.unregister(fd)
                elif output.flooded:
                    status = "output"
            elif fd == pidfd:
                status = status or "ended"
            else:
                end_all()
                sys.exit("the caller is gone")
        if not status and time.monotonic() >= next_look:
            if time.monotonic() - begin > limits["wall_s"]:
                status = "timeout"
            else:
                status = breach(started.pid, started.folders, limits) or ""
            next_look = time.monotonic() + _TICK_S
    wall_s = time.monotonic() - begin
    code = end_all().get(started.pid, 0)
    for fd in output.streams:  # every writer is dead, so this ends
        while not output.flooded and output.take(fd):
            pass
    if status == "ended" and output.flooded:
        status = "output"
    return Ended(status, code, wall_s, *map(bytes, output.streams.values()))


def _reply(head: dict[str, Any], *blobs: bytes) -> None:
    raw = json.dumps(head).encode()
    for part in (len(raw).to_bytes(8, "big"), raw, *blobs):
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def main() -> None:
    libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - lives as long as the process

    def read_exactly(size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = stdin.readinto(view)
            if not got:
                sys.exit("the caller is gone")
            view = view[got:]
        return data

    request = json.loads(read_exactly(int.from_bytes(read_exactly(8), "big")))
    payload = bytes(read_exactly(request["payload_bytes"]))
    try:
        started = start(request, payload)
    except SetupError as fault:
        _reply({"setup_error": str(fault)})
        return
    except RefusedError as fault:
        _reply({"refused": str(fault)})
        return
    ended = watch(started, request["limits"])
    files, left_out = collect(started.folders[0], request["collect"], request["limits"])
    head = {
        "status": ended.status,
        "returncode": ended.returncode,
        "wall_s": ended.wall_s,
        "out": len(ended.out),
        "err": len(ended.err),
        "files": [[name, len(data)] for name, data in files.items()],
        "left_out": left_out,
    }
    _reply(head, ended.out, ended.err, *files.values())


if __name__ == "__main__":
    main()
