"""Runs model-written Python in isolation: the caller's side.

Each call is one supervisor process (`supervisor/`), which starts bubblewrap with fresh namespaces, enforces the
limits on the whole process tree and returns bytes. Nothing that comes out is ever unpickled or executed here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from agentrl.errors import MissingError, RunFailedError
from agentrl.sandbox.layout import INNER_UID, build_layout
from agentrl.sandbox.seccomp import build_filter

Status = Literal["ok", "error", "timeout", "cpu", "memory", "processes", "output", "files"]

_HERE = Path(__file__).parent
_GRACE_S = 40.0  # start-up (30 s) and the end of the tree
_FIRST_UID, _NUM_UIDS = 64_000, 1_000  # no account by convention; apart, so that old kernels count processes apart
_SIGXCPU_CODE = 128 + 24
_NAMESPACES_FIX = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: an unmasked /proc and no seccomp profile that "
    "forbids unshare), or leave the Python tool out of the recipe"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on one call, over its whole process tree unless said otherwise. Each takes effect within 2 s.

    `cpu_s` sums user and system time. `memory_mib` counts private and shared memory, without the workspace, whose
    files live in memory too and have `workspace_mib` of their own (plus 16 MiB of /dev/shm). `processes` counts
    threads as well. `file_mib` caps each file, `open_files` each process, `output_bytes` stdout and stderr together.
    At most 20,000 files exist at once; at most 256 come back.
    """

    wall_s: float = 30.0
    cpu_s: float = 30.0
    memory_mib: int = 1024
    processes: int = 32
    file_mib: int = 64
    workspace_mib: int = 128
    open_files: int = 256
    output_bytes: int = 65_536

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"limits.{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class Result:
    """How a call ended.

    `status` "error" is an exit code other than 0; the others but "ok" name the limit that ended the program. "files"
    means too many files, or input files that do not fit the workspace. "memory" and "processes" are also given when
    the program stopped at the kernel's refusal of either.
    `returncode` is the program's (128 + n for signal n; -9 when a limit ended it). `wall_s` is run time alone;
    `queue_s` is the wait for a free place before it. `files` holds the bytes of collected files by relative path,
    `left_out` those not taken, with the reason: links, pipes, files over the limit.
    """

    stdout: str
    stderr: str
    returncode: int
    status: Status
    wall_s: float
    queue_s: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def _find_bwrap() -> str:
    path = shutil.which("bwrap")
    if path is None:
        raise MissingError(
            "model-written code needs bubblewrap, which is not installed", "apt-get install bubblewrap (Linux only)"
        )
    return os.path.realpath(path)


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
        raise ValueError(f"a file of the sandbox needs a plain relative path, got {name!r}")
    return name


def _length_prefixed(head: Mapping[str, Any]) -> bytes:
    raw = json.dumps(head).encode()
    return len(raw).to_bytes(8, "big") + raw


def _classify(status: str, returncode: int, stderr: str) -> Status:
    """The supervisor's word, or what the exit says. A program can only misname its own failure."""
    if status != "ended":
        return status  # type: ignore[return-value]  # one of the limits' names
    if returncode == 0:
        return "ok"
    if returncode == _SIGXCPU_CODE:
        return "cpu"
    last = stderr.rstrip().rpartition("\n")[2]
    if "MemoryError" in last.partition(":")[0]:
        return "memory"
    if last.startswith("BlockingIOError: [Errno 11]") or last == "RuntimeError: can't start new thread":
        return "processes"
    return "error"


class Sandbox:
    """Isolated Python. `max_concurrent` calls run at once per event loop; others wait their turn.

    Args:
        limits: caps on each call.
        max_concurrent: how many calls run at once.
    """

    def __init__(self, limits: Limits | None = None, max_concurrent: int = 4) -> None:
        self.limits = limits or Limits()
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        self.max_concurrent = max_concurrent
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, code: str, files: Mapping[str, bytes] | None = None, collect: Sequence[str] = ()) -> Result:
        """Run `code` as a program with `files` in its working folder, without blocking the event loop.

        Args:
            code: the program's source.
            files: relative path -> bytes, written before the start.
            collect: relative paths or patterns (`*` also crosses folders) of files to bring back, as bytes.

        Raises:
            MissingError: bubblewrap or the namespaces it needs are missing.
            RunFailedError: the supervisor itself broke.
            ValueError: a name in `files` is not a plain relative path.

        Cancelling the call ends everything inside.
        """
        files = {_check_name(name): data for name, data in (files or {}).items()}
        code = code.encode(errors="replace").decode()  # a lone surrogate cannot be a file's text
        asked = time.monotonic()
        async with self._semaphore():
            queue_s = time.monotonic() - asked
            for last_try in (False, True):
                head, blob = await self._supervise(code, files, collect)
                if "refused" in head:
                    return Result("", f"the input files do not fit: {head['refused']}", 1, "files", 0.0, queue_s)
                if "setup_error" not in head:
                    return _to_result(head, blob, queue_s)
                if last_try:
                    break
        raise MissingError(f"the sandbox does not start here: {head['setup_error']}", _NAMESPACES_FIX)

    async def probe(self) -> None:
        """Run a trivial call and check from inside that it is isolated. Raises `MissingError` if it is not."""
        result = await Sandbox(Limits(wall_s=20, cpu_s=10, memory_mib=256)).run(_PROBE)
        if result.status != "ok" or result.stdout.strip() != "isolated":
            said = (result.stderr.strip() or result.stdout.strip() or result.status).rpartition("\n")[2]
            raise MissingError(f"the sandbox does not isolate here: {said}", _NAMESPACES_FIX)

    def rung(self) -> str:
        """One line on the isolation in use, for `doctor`. Raises `MissingError` without bubblewrap."""
        version = subprocess.run([_find_bwrap(), "--version"], capture_output=True, text=True, check=False).stdout
        user = "an unprivileged uid dropped to from root" if os.geteuid() == 0 else "the caller's unprivileged uid"
        return (
            f"{version.strip() or 'bubblewrap'}: user, mount, network, PID, IPC and UTS namespaces under {user}; "
            "seccomp; read-only root; capped tmpfs; supervised process tree"
        )

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self.max_concurrent))
        return self._places[1]

    def _request(self, payload_bytes: int, collect: Sequence[str]) -> dict[str, Any]:
        layout = build_layout(self.limits.workspace_mib)
        namespaces = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        inner_id = str(INNER_UID)
        argv = [
            *layout.mounts_after,
            *namespaces,
            *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
            *("--uid", inner_id, "--gid", inner_id, "--hostname", "sandbox", "--chdir", "/box", "--seccomp", "4"),
            *("--", layout.python, "-I", "-S", "-c", (_HERE / "inside.py").read_text()),
        ]
        return {
            "bwrap": _find_bwrap(),
            "binds": layout.binds,
            "mounts_before": layout.mounts_before,
            "argv": argv,
            "drop_uid": _FIRST_UID + os.getpid() % _NUM_UIDS if os.geteuid() == 0 else None,
            "seccomp": build_filter().hex(),
            "limits": asdict(self.limits),
            "collect": list(collect),
            "payload_bytes": payload_bytes,
        }

    def _payload(self, code: str, files: Mapping[str, bytes]) -> bytes:
        limits = self.limits
        layout = build_layout(limits.workspace_mib)
        rlimits = {
            "RLIMIT_CPU": int(limits.cpu_s) + 1,  # per process, should the supervisor's sum come late
            "RLIMIT_DATA": limits.memory_mib << 20,  # per process: Python sees MemoryError rather than a kill
            "RLIMIT_NPROC": limits.processes + 10,  # a little above, so that the supervisor sees the breach
            "RLIMIT_FSIZE": limits.file_mib << 20,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        sizes = [[name, len(data)] for name, data in files.items()]
        head = {"code": code, "files": sizes, "rlimits": rlimits, "env": layout.env}
        return b"".join([_length_prefixed(head), *files.values()])

    async def _supervise(
        self, code: str, files: Mapping[str, bytes], collect: Sequence[str]
    ) -> tuple[dict[str, Any], bytes]:
        payload = self._payload(code, files)
        request = self._request(len(payload), collect)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_HERE / "supervisor")),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},  # some interpreters need it to start
            limit=1 << 20,
            start_new_session=True,  # Ctrl-C is the driver's: the first one lets the step, and so this program, finish
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self.limits.wall_s + _GRACE_S):
                process.stdin.write(_length_prefixed(request) + payload)
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(8), "big")
                head: dict[str, Any] = json.loads(await process.stdout.readexactly(size))
                return head, await process.stdout.read()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as fault:
            raise RunFailedError(
                f"the sandbox's supervisor broke ({type(fault).__name__})", "run `agentrl doctor`, then again"
            ) from fault
        finally:
            await asyncio.shield(_end(process))


async def _end(process: Process) -> None:
    """Let the supervisor end its tree (its input closes), then make sure. Bubblewrap dies with it in any case."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 2.0)
    except TimeoutError:
        process.kill()
        await process.wait()


def _to_result(head: Mapping[str, Any], blob: bytes, queue_s: float) -> Result:
    parts: list[bytes] = []
    start = 0
    for size in (head["out"], head["err"], *(size for _, size in head["files"])):
        parts.append(blob[start : start + size])
        start += size
    stdout, stderr = (part.decode(errors="replace") for part in parts[:2])
    names = [name for name, _ in head["files"]]
    return Result(
        stdout=stdout,
        stderr=stderr,
        returncode=head["returncode"] if head["status"] == "ended" else -9,
        status=_classify(head["status"], head["returncode"], stderr),
        wall_s=head["wall_s"],
        queue_s=queue_s,
        files=dict(zip(names, parts[2:], strict=True)),
        left_out=head["left_out"],
    )


_PROBE = """
import os, socket
lines = open("/proc/self/status").read().split("\\n")
status = dict(line.split(":", 1) for line in lines if ":" in line)
assert status["Seccomp"].strip() == "2", "no system-call filter"
assert int(status["CapEff"], 16) == 0 and os.getuid() != 0, "privileged inside"
assert status["NoNewPrivs"].strip() == "1", "privileges can be gained"
assert os.listdir("/sys/class/net") == ["lo"] if os.path.isdir("/sys/class/net") else True, "the network is visible"
try:
    socket.socket()
except PermissionError:
    print("isolated")
"""
