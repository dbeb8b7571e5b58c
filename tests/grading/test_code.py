"""Code grading in the sandbox: what passes, what fails, and what must not be able to pass."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest

from agentrl.errors import RunFailedError
from agentrl.grading.code import CodeGrader, program
from agentrl.sandbox import Limits, Sandbox
from agentrl.types import Score, Task, Trajectory

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="the sandbox needs bubblewrap")

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5\n"


def _grade(answer: str | None, info: dict[str, Any], status: str = "ok", **options: Any) -> Score:
    task = Task("t", "q", info=info)
    trajectory = Trajectory("t/0", task, 0, (), answer, status, "broke")  # type: ignore[arg-type]
    grader = CodeGrader(Sandbox(Limits(wall_s=3.0, cpu_s=3.0, memory_mib=256)), **options)
    return asyncio.run(grader.score(task, trajectory))


def test_the_last_fenced_block_is_the_program() -> None:
    assert program(f"first\n```python\nx = 1\n```\nthen\n```py\n{ADD}```\nbye") == ADD
    assert program(ADD) == ADD


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (ADD, 1.0),
        (f"Here:\n```python\n{ADD}```", 1.0),
        ("def add(a, b):\n    return a - b\n", 0.0),
        ("def add(a, b:\n", 0.0),
        ("x = 1\n", 0.0),
        (ADD + "import sys; sys.exit(0)\n", 0.0),
        (ADD + "import os; os._exit(0)\n", 0.0),
        ("raise SystemExit", 0.0),
        ("import atexit\ndef add(a, b):\n    print('passed'); raise SystemExit(0)\n", 0.0),
    ],
)
def test_a_program_passes_when_its_tests_ran_to_their_end(answer: str, value: float) -> None:
    assert _grade(answer, {"tests": TESTS}).value == value


def test_a_program_that_loops_or_takes_too_much_is_zero() -> None:
    assert _grade("while True: pass", {"tests": TESTS}).reason in ("stopped: timeout limit", "stopped: cpu limit")
    assert _grade("x = bytearray(10**10)", {"tests": TESTS}).value == 0.0


def test_a_function_is_checked_as_in_humaneval() -> None:
    info = {"tests": CHECK, "entry_point": "add", "prompt": "def add(a, b):\n"}
    assert _grade("    return a + b\n", info).value == 1.0
    assert _grade(ADD, info).value == 1.0
    assert _grade("    return a\n", info).value == 0.0


CASES = {"cases": [{"input": "2 3\n", "output": "5"}, {"input": "4 4\n", "output": "8\n"}]}
READS = "a, b = map(int, input().split())\nprint(a + b)\n"


def test_printed_output_is_compared_outside_of_the_sandbox() -> None:
    assert _grade(READS, CASES).value == 1.0
    assert _grade("print(5)", CASES).value == 0.0
    assert _grade("print(5)", CASES, partial=True).value == 0.5
    assert (
        _grade("import sys\nif __name__ == '__main__': print(sum(map(int, sys.stdin.read().split())))", CASES).value
        == 1
    )
    assert _grade("print(open('case.json').read())", CASES).value == 0.0


def test_no_answer_is_zero_and_what_cannot_be_graded_missing() -> None:
    assert _grade(None, CASES) == Score(0.0, "no answer")
    assert _grade(READS, {}).missing
    assert _grade(READS, {"cases": [{"in": "1"}]}).missing
    assert _grade(READS, CASES, status="failed") == Score(None, "rollout failed: broke")


def test_a_sandbox_that_breaks_gives_a_missing_score() -> None:
    class Broken(Sandbox):
        async def run(self, *_: Any, **__: Any) -> Any:
            raise RunFailedError("the supervisor broke", "again")

    task = Task("t", "q", info=CASES)
    score = asyncio.run(CodeGrader(Broken()).score(task, Trajectory("t/0", task, 0, (), READS, "ok")))
    assert score == Score(None, "grader failed: the supervisor broke")
