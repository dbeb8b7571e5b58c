"""The command line in this process, in a user's folder, on tiny models."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cli import app

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")
REWARD = """
from agentrl.types import Score


class Parity:
    async def score(self, task, trajectory):
        return Score(float(sum(len(turn.action.text) for turn in trajectory.turns) % 2))


def parity():
    return Parity()


def broken():
    raise KeyError("a fault of the user's own")


class Synchronous:
    def score(self, task, trajectory):
        return Score(1.0)


def a_number():
    return 1.0


class Bare:
    async def score(self, task, trajectory):
        return 1.0


def with_arguments(task, trajectory):
    return 1.0
"""


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def two_lines(self, code: int, cause: str, fix: str = "") -> None:
        """Every fault is one line of cause and one of fix, without a trace, and the first is this one."""
        assert self.code == code, self
        lines = self.err.strip().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("error: "))
        assert [line.split(": ")[0] for line in lines[first:]] == ["error", "fix"] * ((len(lines) - first) // 2)
        assert cause in lines[first], self.err
        assert fix in lines[first + 1], self.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: `parity_reward.py`, without GPU and without secrets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "parity_reward.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def cli(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`cli("mars", "train", ...)`: exit code, stdout and stderr. `sets` become `--set` options."""

    def run(*args: str, sets: tuple[str, ...] = ()) -> Done:
        capfd.readouterr()
        words = [*args, *(word for text in sets for word in ("--set", text))]
        with pytest.raises(SystemExit) as left:
            app(words)
        out, err = capfd.readouterr()
        code = left.value.code
        return Done(code if isinstance(code, int) else 0, out, err)

    return run


@dataclass(slots=True)
class Driver:
    """A run of the command line in a process of its own. Whatever it starts carries `mark` in its environment."""

    ask: Callable[[dict[str, Any]], dict[str, Any]]
    pid: int
    folder: Path
    mark: str
    code: int | None = None

    def wait(self, timeout: float = 60) -> int:
        """The exit code, negative for a signal. Fails when the process does not end in time."""
        if self.code is None:
            self.code = self.ask({"wait": self.pid, "timeout": timeout})["code"]
        assert self.code is not None, f"still running after {timeout} s:\n{self.log}"
        return self.code

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def log(self) -> str:
        """Its stdout and stderr so far."""
        return (self.folder / f"{self.mark}.log").read_text()

    def wait_for(self, name: str, timeout: float = 60) -> None:
        """Until the run has made the file `name` in its folder. Fails when it ends or takes too long."""
        deadline = time.monotonic() + timeout
        while not (self.folder / name).exists():
            self.code = self.ask({"wait": self.pid, "timeout": 0})["code"]
            assert self.code is None, f"ended before {name}:\n{self.log}"
            assert time.monotonic() < deadline, f"no {name} after {timeout} s:\n{self.log}"
            time.sleep(0.02)

    def left(self, also: Iterable[int] = (), timeout: float = 5) -> dict[int, str]:
        """What it started, and what of `also`, still lives after `timeout` seconds, by id; zombies are dead."""
        return still_there(self.mark, also, timeout)


def descendants(pid: int) -> dict[int, str]:
    """Id -> command line of every process below `pid` now."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in map(int, task.read_text().split()):
                    found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
                    waiting.append(child)
    return found


def marked(mark: str) -> dict[int, str]:
    """Id -> command line of every process with `mark` in the environment it was started with; zombies are dead."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command[:100]
            except OSError:
                continue
    return found


def still_there(mark: str, also: Iterable[int], timeout: float) -> dict[int, str]:
    """Processes with `mark`, and those of `also`, that live after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # a zombie has no environment and no open files left, but an entry
        alive = {p: "" for p in also if Path(f"/proc/{p}").exists() and " Z " not in _stat(p)}
        found = alive | marked(mark)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


@pytest.fixture(scope="session")
def processes() -> SimpleNamespace:
    """`below(pid)` and `left(mark, also, timeout)`: the processes under one, and those that should be gone."""
    return SimpleNamespace(below=descendants, left=still_there)


@pytest.fixture(scope="session")
def warm_driver() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    script = Path(__file__).with_name("warm_driver.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    yield ask
    process.stdin.close()
    process.wait(10)


@pytest.fixture
def drive(warm_driver: Callable[[dict[str, Any]], dict[str, Any]], folder: Path) -> Iterator[Callable[..., Driver]]:
    """`drive("mars", "train", ...)` starts the command line in `folder`; what still runs at the end is killed."""
    drivers: list[Driver] = []

    def start(*args: str, sets: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Driver:
        mark = f"agentrl-test-{os.getpid()}-{folder.name}-{len(drivers)}"
        words = [*args, *(word for text in sets for word in ("--set", text))]
        request = {"args": words, "cwd": str(folder), "log": str(folder / f"{mark}.log")}
        pid = warm_driver({**request, "env": {"AGENTRL_TEST_MARK": mark, **(env or {})}})["pid"]
        drivers.append(Driver(warm_driver, pid, folder, mark))
        return drivers[-1]

    yield start
    for driver in drivers:
        if driver.code is None:
            driver.signal(signal.SIGKILL)
            driver.wait(10)
