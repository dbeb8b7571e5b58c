"""The process tree of one call: what it uses, and its end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

_MAX_INODES = 20_000  # empty files cost kernel memory that no size cap counts
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # it ended meanwhile
    return found


def _tree(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += _children(pid)


def _fields(path: str) -> dict[str, int]:
    """The numeric lines of a /proc file (kB or counts), empty when the process is gone or hidden."""
    fields = {}
    try:
        with open(path) as file:
            for line in file:
                name, _, rest = line.partition(":")
                value = rest.split()
                if value and value[0].isdigit():
                    fields[name] = int(value[0])
    except OSError:
        pass
    return fields


def _exact_kib(pid: int) -> int:
    """The tree's memory now, with pages that forks share counted once (proportional set size), and page tables."""
    total = 0
    for child in _tree(pid):
        rollup = _fields(f"/proc/{child}/smaps_rollup")
        status = _fields(f"/proc/{child}/status")  # read last: a process that just ended has no memory lines left
        if "Pss_Anon" in rollup:
            total += rollup["Pss_Anon"] + rollup.get("Pss_Shmem", 0) + rollup.get("SwapPss", 0)
        else:
            total += status.get("RssAnon", 0) + status.get("RssShmem", 0) + status.get("VmSwap", 0)
        total += status.get("VmPTE", 0)
    return total


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _CLOCK_TICKS  # own and reaped children's, user and system


def breach(pid: int, folders: list[int], limits: dict[str, Any]) -> str | None:
    """Which limit the tree below `pid` has crossed, if any. Bubblewrap's own two processes are not counted."""
    pids = list(_tree(pid))
    status = {p: _fields(f"/proc/{p}/status") for p in pids}
    if sum(s.get("Threads", 0) for s in status.values()) - 2 > limits["processes"]:
        return "processes"
    if sum(_cpu_s(p) for p in pids) > limits["cpu_s"]:
        return "cpu"
    cap_kib = limits["memory_mib"] * 1024
    at_most_kib = sum(s.get("VmRSS", 0) + s.get("VmSwap", 0) + s.get("VmPTE", 0) for s in status.values())
    # Forks that end while they are being measured leave their share to the next: only a lasting excess counts.
    if at_most_kib > cap_kib and all(_exact_kib(pid) > cap_kib for _ in range(3)):
        return "memory"
    for folder in folders:
        usage = os.fstatvfs(folder)
        if usage.f_files - usage.f_ffree > _MAX_INODES:
            return "files"
    return None


def end_all() -> dict[int, int]:
    """Kill every process below this one and wait until the kernel has let go of the last. Returns exit codes.

    Orphans come back to us (child subreaper), and when the first process of a PID namespace is reaped, the kernel has
    already ended all others in it: new sessions, double forks and threads included.
    """
    codes: dict[int, int] = {}
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(raw)
            continue
        for child in _children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.001)
