"""Runs inside the sandbox before the model's program: unpacks it, lowers the limits, hands the workspace out, execs.

Its source travels as `python -c`, so that nothing of the project is mounted. File descriptor 3 is the supervisor's
control socket: 8 bytes of length, JSON, then the files' bytes. The answer is `ok` with two descriptors (workspace and
shared memory), through which the supervisor counts files and reads results after everything in here is dead.
"""

import json
import os
import resource
import socket
import sys
from typing import Any

CONTROL_FD = 3
WORK = "/box/work"
PROGRAM = "/box/main.py"


def read_exactly(control: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = control.recv_into(view)
        if not got:
            sys.exit("the supervisor went away")
        view = view[got:]
    return data


def unpack(control: socket.socket, spec: dict[str, Any]) -> None:
    for folder in (WORK, "/box/tmp"):
        os.mkdir(folder)
    with open(PROGRAM, "w", encoding="utf-8") as program:
        program.write(spec["code"])
    for name, size in spec["files"]:
        path = os.path.join(WORK, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(read_exactly(control, size))


def main() -> None:
    os.set_inheritable(CONTROL_FD, False)
    control = socket.socket(fileno=CONTROL_FD)
    spec = json.loads(read_exactly(control, int.from_bytes(read_exactly(control, 8), "big")))
    try:
        unpack(control, spec)
    except (OSError, ValueError) as fault:  # names that clash or are too long, a full workspace
        control.send(f"refused: {fault}".encode(errors="replace")[:1000])
        return
    os.chdir(WORK)
    for name, value in spec["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value + 1 if name == "RLIMIT_CPU" and hard != value else value))
    folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (WORK, "/dev/shm")]
    socket.send_fds(control, [b"ok"], folders)
    if control.recv(1) != b"g":
        sys.exit("the supervisor went away")
    # -P: the program's own folder stays off the path; the workspace is on it by PYTHONPATH.
    os.execve(sys.executable, [sys.executable, "-P", PROGRAM], spec["env"])


main()
