"""How a run ends: in time, in order, with its exit code, and without leaving a process behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = ("model.name=tiny-llama", "model.dtype=float32", "launch.threads=1")
SHORT = ("data.eval.limit=1", "rollout.questions_per_step=2", "rollout.group_size=4", "run.save_every=1")
SETS = (*TINY, *SHORT, "reward=hold:hold")
# `HOLD` says where the run makes the file `here`, and dawdles. The file `go` lets it go on.
HOLD = """
import asyncio
import hashlib
import os
import pathlib
import time

from agentrl.errors import EngineError
from agentrl.protocols import ToolResult
from agentrl.recipes.mars import train
from agentrl.rollout import hf_generate
from agentrl.update.policy import Policy
from parity_reward import Parity

WHERE = os.environ.get("HOLD", "")
HERE, GO = pathlib.Path("here"), pathlib.Path("go")


class Holding(Parity):
    async def score(self, task, trajectory):
        if trajectory.id.startswith("train-000001") and WHERE in ("waiting", "sandbox"):
            if WHERE == "sandbox":
                from agentrl.sandbox import Sandbox

                asyncio.get_running_loop().call_later(1, HERE.touch)
                await Sandbox().run("import time; time.sleep(50)")
            HERE.touch()
            while not GO.exists():
                await asyncio.sleep(0.02)
        return await super().score(task, trajectory)


class Breaking:
    name = "breaking"
    description = "Breaks the engine."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    async def call(self, arguments):
        raise EngineError("the engine is gone", "start another")


def slow_step(policy, batch, step=hf_generate._step):
    HERE.touch()
    time.sleep(0.5)
    return step(policy, batch)


def deaf_update(*args, update=train.update_policies):
    HERE.touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # as in torch: no signal is handled before it returns
    return update(*args)


def hold():
    if WHERE == "generating":
        hf_generate._step = slow_step
    if WHERE == "updating":
        train.update_policies = deaf_update
    if WHERE == "bad weights":
        whole = Policy.compute_weights
        Policy.compute_weights = lambda self: {n: w for n, w in whole(self).items() if "norm" not in n}
    return Holding()
"""


@pytest.fixture(autouse=True)
def _hold(folder: Path) -> None:
    (folder / "hold.py").write_text(HOLD)


@pytest.fixture
def start(drive: Callable[..., Any]) -> Callable[..., Any]:
    """A training run of two steps on the hf engine, named `r`."""

    def run(where: str = "", *sets: str) -> Any:
        words = ("mars", "train", "mars-embedded", "--smoke", "--steps", "2", "--name", "r")
        return drive(*words, sets=(*SETS, *sets), env={"HOLD": where})

    return run


def ended(driver: Any, code: int, within: float = 12) -> None:
    """The exit code, in time; one fault of two lines at most; nothing left."""
    assert driver.wait(within) == code, driver.log
    assert driver.left() == {}
    check_log(driver.log, fault=code != 0 and code != -signal.SIGKILL)


def check_log(log: str, *, fault: bool) -> None:
    assert "Traceback" not in log, log
    assert "never retrieved" not in log, log
    last = log.strip().splitlines()[-2:]
    assert [line.split(": ")[0] for line in last] == ["error", "fix"] if fault else "error:" not in log, log


def steps_of(folder: Path) -> list[int]:
    path = folder / "runs/r/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_that_ends_and_one_whose_engine_breaks_leave_nothing(start, folder):
    ended(start(), 0, within=60)
    assert steps_of(folder) == [1, 2]
    shutil.rmtree(folder / "runs")
    calls = ("agents.system2.tools=[breaking]", "agents.system2.sampling.max_tokens=120")
    driver = start("", "tools.custom.breaking=hold:Breaking", *calls)
    ended(driver, 1, within=60)
    assert "error: the engine is gone\nfix: start another" in driver.log


def test_ctrl_c_once_finishes_the_step_and_saves_it(start, folder):
    driver = start("waiting")
    driver.wait_for("here")
    driver.signal(signal.SIGINT)
    time.sleep(0.3)
    assert "stopping after this step; Ctrl-C again stops now" in driver.log
    (folder / "go").touch()
    ended(driver, 130, within=30)
    assert steps_of(folder) == [1]
    assert (folder / "runs/r/checkpoints/step_000001/manifest.json").exists()
    assert json.loads((folder / "runs/r/summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("generating", [signal.SIGINT] * 6),
        ("waiting", [signal.SIGINT] * 2),
        ("updating", [signal.SIGINT] * 2),
        ("waiting", [signal.SIGTERM]),
    ],
)
def test_ctrl_c_twice_or_a_termination_stops_now_and_in_order(start, folder, where, numbers):
    driver = start(where)
    driver.wait_for("here")
    time.sleep(0.2)
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            driver.signal(number)
        time.sleep(0.05)
    ended(driver, 130)
    assert driver.log.count("stopping now") == 1
    assert steps_of(folder) == []
    assert not list((folder / "runs/r/checkpoints").iterdir())


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_programs_in_the_sandbox_end_with_a_run_that_is_killed(start, processes):
    driver = start("sandbox")
    driver.wait_for("here")
    below = processes.below(driver.pid)
    assert any("bwrap" in command for command in below.values())
    driver.signal(signal.SIGKILL)
    assert driver.wait(8) == -signal.SIGKILL
    assert driver.left(below) == {}


def test_the_first_ctrl_c_ends_a_command_without_steps(drive, folder):
    words = ("mars", "eval", "mars-embedded", "--smoke", "--name", "r")
    driver = drive(*words, sets=(*SETS, "data.eval.limit=4"), env={"HOLD": "generating"})
    driver.wait_for("here")
    driver.signal(signal.SIGINT)
    ended(driver, 130)


# --- slow: vLLM, as a user starts it, with the signals of a terminal ----------------------------------------------


class VLLMRun:
    """`agentrl mars train` with vLLM on a tiny model, in a process group of its own."""

    def __init__(self, folder: Path, where: str, processes: Any) -> None:
        self.mark = f"agentrl-test-{os.getpid()}-{folder.name}"
        self.processes = processes
        self.seen: dict[int, str] = {}  # Ray and vLLM write their titles over the environment that holds the mark
        sets = (*SETS, "engine.kind=vllm", "engine.max_model_len=700", "engine.kv_cache_gib=0.2")
        words = ["mars", "train", "mars-embedded", "--smoke", "--steps", "2", "--name", "r"]
        words += [word for text in sets for word in ("--set", text)]
        self.log_path = folder / "log"
        environment = {**os.environ, "HOLD": where, "AGENTRL_TEST_MARK": self.mark, "PYTHONPATH": str(folder)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from agentrl.cli import app; app()", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline, self.log_path.read_text()
            self.look()
            time.sleep(0.1)
        self.look()

    def look(self) -> dict[int, str]:
        """Everything that it has started so far and that the eye caught."""
        self.seen |= self.processes.below(self.process.pid)
        return self.seen

    def ended(self, code: int, within: float = 60) -> None:
        deadline = time.monotonic() + within
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.1)
        assert self.process.poll() == code, self.log_path.read_text()
        assert self.processes.left(self.mark, self.seen, 10) == {}
        check_log(self.log_path.read_text(), fault=code > 0)


@pytest.fixture
def vllm_run(folder: Path, processes: Any) -> Iterator[Callable[[str], VLLMRun]]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    runs: list[VLLMRun] = []

    def begin(where: str) -> VLLMRun:
        runs.append(VLLMRun(folder, where, processes))
        return runs[-1]

    yield begin
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(10)


def listening(pids: set[int]) -> set[str]:
    """Addresses, as the kernel writes them, on which the processes listen for TCP."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
                found.add(cells[1].partition(":")[0])
    return found


@pytest.mark.slow
def test_vllm_ctrl_c_of_a_terminal_once_finishes_the_step_and_saves_it(vllm_run, folder):
    run = vllm_run("waiting")
    run.wait_for((folder / "here").exists)
    ours = run.look()
    assert any("VLLM::" in command for command in ours.values()), ours
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert listening({*ours, run.process.pid})
    assert listening({*ours, run.process.pid}) <= loopback
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(0.5)
    (folder / "go").touch()
    run.ended(130)
    assert steps_of(folder) == [1]
    assert (folder / "runs/r/checkpoints/step_000001/manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 130), ([signal.SIGKILL], -signal.SIGKILL)],
)
def test_vllm_a_run_stopped_in_its_rollouts_leaves_nothing(vllm_run, folder, numbers, code):
    run = vllm_run("waiting")
    run.wait_for((folder / "here").exists)
    for number in numbers:
        os.killpg(run.process.pid, number) if number == signal.SIGINT else run.process.send_signal(number)
        time.sleep(0.3)
    run.ended(code)
    assert steps_of(folder) == []
    # Ray's own handler would print a trace, and abort the process when closing takes longer than 3 s.
    assert "signal" not in run.log_path.read_text().lower()


@pytest.mark.slow
@pytest.mark.parametrize("process", ["gcs_server", "VLLM::"])
def test_vllm_a_run_stopped_while_its_engine_starts_leaves_nothing(vllm_run, process):
    run = vllm_run("")
    run.wait_for(lambda: any(process in command for command in run.look().values()))
    run.process.send_signal(signal.SIGTERM)
    run.ended(130)


@pytest.mark.slow
def test_vllm_a_weight_sync_that_fails_ends_the_run_and_leaves_nothing(vllm_run, folder):
    run = vllm_run("bad weights")
    run.ended(1, within=150)
    assert "did not take version 1" in run.log_path.read_text()
