"""Programs against tests, run in the sandbox: assertions about a function, or what a program prints.

A program that fails, loops or takes too much is a true 0. A sandbox that breaks gives a missing score. What a program
must print never enters the sandbox. Assertions do, so a program that goes looking for them could find them; one that
merely exits early does not pass, because the tests must report their end with a secret that the program is not given.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import RunFailedError
from agentrl.sandbox import Limits, Result, Sandbox
from agentrl.types import Score, Task, Trajectory

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)

_HARNESS = """\
import json, os, sys
with open("case.json", encoding="utf-8") as file:
    case = json.load(file)
os.remove("case.json")
def run(case):
    secret, write = case.pop("secret"), os.write
    space = {"__name__": "solution"}
    exec(compile(case["program"], "solution.py", "exec"), space)
    exec(compile(case["tests"], "tests.py", "exec"), space)
    if case["entry_point"] is not None:
        space["check"](space[case["entry_point"]])
    sys.stdout.flush()
    write(1, ("\\n" + secret + "\\n").encode())
run(case)
"""

_STDIN_HARNESS = """\
import io, os, sys
sys.stdin = io.TextIOWrapper(io.BytesIO(open("stdin.txt", "rb").read()), encoding="utf-8")
os.remove("stdin.txt")
with open("program.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a program: what it reads, and what it must print (compared line by line, trailing space aside)."""

    stdin: str
    expected: str


def program(text: str) -> str:
    """The program in an answer: its last fenced Python block, else the whole text."""
    blocks: list[str] = _FENCE.findall(text)
    return blocks[-1] if blocks else text


class CodeGrader:
    """A `Reward`: 1 when the program passes all tests, else 0; with `partial` the share of cases it passes.

    The task's `info` holds either `cases`, a list of {"input", "output"}, or `tests`, Python source run after the
    program. With `entry_point` the tests define `check(function)`, as HumanEval's do, and `prompt` stands before a
    completion that is only the function's body.
    """

    def __init__(self, sandbox: Sandbox | None = None, *, partial: bool = False) -> None:
        self._sandbox = sandbox or Sandbox(Limits(wall_s=10.0, cpu_s=10.0))
        self._partial = partial

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Raises `MissingError` where this machine cannot isolate at all."""
        if trajectory.status == "failed":
            return Score(None, f"rollout failed: {trajectory.status_reason}")
        info = task.info
        if not info.get("cases") and not info.get("tests"):
            return Score(None, "grader failed: the task has neither cases nor tests")
        if trajectory.answer is None or not trajectory.answer.strip():
            return Score(0.0, "no answer")
        source = program(trajectory.answer)
        try:
            if info.get("cases"):
                cases = [Case(str(c["input"]), str(c["output"])) for c in info["cases"]]
                return await self.run_cases(source, cases)
            return await self.run_tests(_with_prompt(source, info), str(info["tests"]), info.get("entry_point"))
        except (KeyError, TypeError) as error:
            return Score(None, f"grader failed: a case of the task is malformed ({type(error).__name__}: {error})")
        except RunFailedError as error:
            return Score(None, f"grader failed: {error.cause}")

    async def run_tests(self, source: str, tests: str, entry_point: str | None = None) -> Score:
        """Run a program, then `tests` in its namespace. Raises as the sandbox does."""
        secret = secrets.token_hex(16)
        case = {"program": source, "tests": tests, "entry_point": entry_point, "secret": secret}
        result = await self._sandbox.run(_HARNESS, {"case.json": json.dumps(case).encode()})
        passed = result.status == "ok" and result.stdout.rstrip("\n").endswith("\n" + secret)
        return Score(1.0, "all tests pass") if passed else Score(0.0, _why(result))

    async def run_cases(self, source: str, cases: Sequence[Case]) -> Score:
        """Run a program once per case, until one fails (all of them with `partial`). Raises as the sandbox does."""
        passed, why = 0, ""
        for number, case in enumerate(cases, start=1):
            files = {"program.py": source.encode(errors="replace"), "stdin.txt": case.stdin.encode(errors="replace")}
            result = await self._sandbox.run(_STDIN_HARNESS, files)
            if result.status == "ok" and _lines(result.stdout) == _lines(case.expected):
                passed += 1
                continue
            why = why or f"case {number}: {_why(result)}"
            if not self._partial:
                break
        if passed == len(cases):
            return Score(1.0, "all cases pass")
        return Score(passed / len(cases) if self._partial else 0.0, why)


def _with_prompt(source: str, info: Mapping[str, Any]) -> str:
    """The program, after the prompt that it completes unless it defines the function itself."""
    prompt, entry = info.get("prompt"), info.get("entry_point")
    if not prompt or (entry and re.search(rf"^(?:async\s+)?def\s+{re.escape(str(entry))}\b", source, re.MULTILINE)):
        return source
    return f"{prompt}{source}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _why(result: Result) -> str:
    if result.status == "ok":
        return "wrong output or early exit"
    if result.status != "error":
        return f"stopped: {result.status} limit"
    return (result.stderr.strip().rpartition("\n")[2] or "it failed")[:200]
