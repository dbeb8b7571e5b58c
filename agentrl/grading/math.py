r"""Math answers against references: equal as mathematics, by `math-verify` in a process of its own.

The process is ended by the kernel when an answer takes too long, and another takes its place, so the limit holds from
any thread or process and inside any C call. What could not be graded is a missing score, never a silent zero; a
reference that is plain text is compared as text, because symbolic parsers read words as products of their letters.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl.errors import MissingError
from agentrl.grading.math_worker import last_boxed
from agentrl.grading.qa import normalise
from agentrl.types import Score, Task, Trajectory

_WORKER = Path(__file__).with_name("math_worker.py")
_START_S = 120.0  # imports of a symbolic algebra system, on a busy machine
_GRACE_S = 5.0
_MAX_CHARS = 20_000
_TEXT_MACRO = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_TEXT = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[\s,.'-]+[^\W\d_]+)*[\s.]*")


def extract(text: str) -> str:
    r"""The answer in a solution: its last `\boxed{...}`, else the whole text."""
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed.strip()


class MathGrader:
    """A `Reward`: 1 when the answer equals a reference, else 0; missing where it cannot be graded.

    `timeout_s` limits one comparison. `workers` comparisons run at once. Safe to use from several threads; `close`
    ends the processes, and they end by themselves when this one does.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1) -> None:
        if timeout_s <= 0 or workers < 1:
            raise ValueError(f"timeout_s must be above 0 and workers at least 1, got {timeout_s} and {workers}")
        self._timeout_s = timeout_s
        self._idle = [_Worker() for _ in range(workers)]
        self._lock = threading.Condition()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="math-grader")
        self._closed = False

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if trajectory.status == "failed":
            return Score(None, f"rollout failed: {trajectory.status_reason}")
        answer = trajectory.answer or ""
        if not answer.strip() and any(r.strip() for r in task.references):
            return Score(0.0, "no answer")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.grade, answer, task.references)

    def grade(self, answer: str, references: Sequence[str]) -> Score:
        """Grade one answer. Raises `MissingError` when the process does not start."""
        usable = [r for r in references if r.strip()]
        if not usable:
            return Score(None, "no reference answer")
        if max(len(answer), *(len(r) for r in usable)) > _MAX_CHARS:
            # A long solution is graded by what it boxes, else by its end.
            answer = extract(answer)[-_MAX_CHARS:]
        said = _as_text(extract(answer))
        if any(said == _as_text(r) for r in usable):
            return Score(1.0, "match")
        symbolic = [r for r in usable if not _is_text(r)]
        if not symbolic:
            return Score(0.0, "no match")
        worker = self._take()
        try:
            outcome = worker.ask(answer, symbolic, self._timeout_s)
        finally:
            self._give(worker)
        if isinstance(outcome, str):
            return Score(None, f"grader failed: {outcome}")
        if any(outcome):
            return Score(1.0, "match")
        if all(equal is None for equal in outcome) and len(symbolic) == len(usable):
            return Score(None, f"grader failed: the reference {symbolic[0][:80]!r} cannot be read as mathematics")
        return Score(0.0, "no match")

    def close(self) -> None:
        """End the processes. Safe to call twice; comparisons that run are waited for."""
        self._threads.shutdown(wait=True)
        with self._lock:
            self._closed = True
            for worker in self._idle:
                worker.stop()

    def _take(self) -> _Worker:
        with self._lock:
            while not self._idle:
                self._lock.wait()
            return self._idle.pop()

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)
            if self._closed:
                worker.stop()
            self._lock.notify()


class _Worker:
    """One process, started on first use and again after each time that it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, answer: str, references: Sequence[str], limit_s: float) -> list[bool | None] | str:
        """Whether the answer equals each reference, or the fault that kept the process from telling."""
        process = self._running()
        request = {"answer": answer, "references": list(references), "limit_s": limit_s}
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, limit_s + _GRACE_S)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self.stop()
            timed_out = process.returncode in (-signal.SIGALRM, -signal.SIGKILL)
            return f"no result within {limit_s:g} s" if timed_out else f"its process ended ({process.returncode})"
        reply = json.loads(line)
        equal: list[bool | None] | None = reply.get("equal")
        return str(reply["fault"]) if equal is None else equal

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(0.2)  # an alarm that has just ended it tells why
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = process
        if self._line(process, _START_S) != b"ready\n":
            self.stop()
            raise MissingError("the math grader does not start", "install it again: pip install math-verify")
        return process

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """The next line, or what came of it before the process or the time ended."""
        assert process.stdout is not None
        end, got = time.monotonic() + limit_s, b""
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not got.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                break
            piece = process.stdout.read1(65_536)  # type: ignore[attr-defined]  # a buffered pipe has it
            if not piece:
                break
            got += piece
        return got


def _as_text(text: str) -> str:
    plain = _TEXT_MACRO.sub(r"\1", extract(text)).strip().strip("$")
    return normalise(plain) if _TEXT.fullmatch(plain.strip()) else " ".join(plain.split())


def _is_text(text: str) -> bool:
    return _TEXT.fullmatch(_TEXT_MACRO.sub(r"\1", extract(text)).strip().strip("$").strip()) is not None
