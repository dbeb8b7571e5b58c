"""Starting bubblewrap: root is left first, and the program is handed over only when the sandbox is up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from typing import Any, NamedTuple

from staging import drop_to, stage
from tree import end_all

_STARTUP_S = 30.0
_CONTROL_FD, _SECCOMP_FD = 3, 4


class SetupError(Exception):
    """The sandbox did not come up; the model's program never started."""


class RefusedError(Exception):
    """The sandbox is up, but the input files do not fit into it."""


def _exec_bwrap(request: dict[str, Any], fds: dict[int, int]) -> None:
    """In the forked child: wire the descriptors, leave root, become bubblewrap. Never returns."""
    step = "wire descriptors"
    try:
        spares = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for target, fd in fds.items()}
        for target, fd in spares.items():
            os.dup2(fd, target, inheritable=True)
        os.chdir("/")
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        sources = [source for source, _ in request["binds"]]
        uid = request["drop_uid"]
        if uid is not None:
            step = "stage the interpreter"
            # A container's root may lack the right to mount: fine if the sources are readable anyway.
            with contextlib.suppress(PermissionError):
                sources = stage(sources)
            step = f"leave root for uid {uid}"
            drop_to(uid)
        binds = [
            part
            for source, (_, target) in zip(sources, request["binds"], strict=True)
            for part in ("--ro-bind", source, target)
        ]
        step = "start bubblewrap"
        bwrap = request["bwrap"]
        os.execve(bwrap, [bwrap, *request["mounts_before"], *binds, *request["argv"]], {})
    except (OSError, StopIteration) as fault:
        os.write(2, f"{step}: {fault}\n".encode())
    finally:
        os._exit(126)


class Started(NamedTuple):
    pid: int
    out: int
    err: int
    folders: list[int]  # workspace, shared memory


def _hand_over(control: socket.socket, payload: bytes) -> tuple[bytes, list[int]]:
    """Send the payload and wait for the answer. A refusal may come before all is sent."""
    with contextlib.suppress(ConnectionError):
        control.sendall(payload)
    word, folders, _, _ = socket.recv_fds(control, 2000, 2)
    return word, folders


def start(request: dict[str, Any], payload: bytes) -> Started:
    """Start bubblewrap and hand over the program.

    Raises:
        SetupError: bubblewrap failed; the text is what it said.
        RefusedError: the input files do not fit.
    """
    ours, theirs = socket.socketpair()
    seccomp_read, seccomp_write = os.pipe()
    os.write(seccomp_write, bytes.fromhex(request["seccomp"]))  # about 1 KiB: fits the pipe
    os.close(seccomp_write)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    fds = {0: null, 1: out_write, 2: err_write, _CONTROL_FD: theirs.fileno(), _SECCOMP_FD: seccomp_read}
    pid = os.fork()
    if pid == 0:
        _exec_bwrap(request, fds)
    theirs.close()
    for fd in (seccomp_read, out_write, err_write, null):
        os.close(fd)
    ours.settimeout(_STARTUP_S)
    try:
        word, folders = _hand_over(ours, payload)
        if word.startswith(b"refused: "):
            end_all()
            raise RefusedError(word.removeprefix(b"refused: ").decode())
        if word != b"ok":
            raise ConnectionError
        ours.sendall(b"g")
    except (OSError, ConnectionError) as fault:
        os.kill(pid, signal.SIGKILL)
        os.set_blocking(err_read, False)
        end_all()
        try:
            said = os.read(err_read, 4000).decode(errors="replace").strip()
        except BlockingIOError:
            said = ""
        raise SetupError(said or f"nothing came up within {_STARTUP_S:.0f} s ({type(fault).__name__})") from fault
    finally:
        ours.close()
    return Started(pid, out_read, err_read, folders)
