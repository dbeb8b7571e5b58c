"""Ends what a killed process would leave behind: `python -m agentrl.launch.guard <leader> --group G | --folder D`.

Neither `atexit` nor signal handlers run after `kill -9`, and neither Ray's agents nor vLLM's engine processes watch
who started them. So a leader starts this small process, which sleeps until its parent is gone and then kills what is
left: a process group, or every process that holds a file open in a folder (Ray's session folder: its daemons, workers
and their children all log there).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.5
_SWEEP_S = 10.0


def guard_group() -> None:
    """Make this process the leader of a process group that dies with it, however it dies. Children started later
    belong to the group unless they leave it."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    _start(["--group", str(os.getpid())])


def guard_folder(folder: Path) -> subprocess.Popen[bytes]:
    """When this process dies, kill every process with a file open under `folder`, and remove the folder.

    Terminate the returned process to call it off."""
    return _start(["--folder", str(folder)])


def processes_in(folder: Path) -> Iterator[int]:
    """Ids of the processes, this one excepted, that hold a file open under `folder`."""
    prefix = f"{folder}/"
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if any(os.readlink(fd.path).startswith(prefix) for fd in os.scandir(f"/proc/{entry.name}/fd")):
                yield int(entry.name)


def kill_processes_in(folder: Path, timeout_s: float = _SWEEP_S) -> bool:
    """Kill them, and those they start meanwhile. Whether none was left in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pids = list(processes_in(folder))
        if not pids:
            return True
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return False


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    # A session of its own keeps Ctrl-C and the group's own death away from it.
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.launch.guard", str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill what a process leaves behind when it dies.")
    parser.add_argument("leader", type=int)
    parser.add_argument("--group", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    while os.getppid() == options.leader:
        time.sleep(_POLL_S)
    if options.group is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(options.group, signal.SIGKILL)
    if options.folder is not None:
        kill_processes_in(options.folder)
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
