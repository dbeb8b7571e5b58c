"""Math grading: equal as mathematics, with a limit that holds, and no silent zeros or ones."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.grading.math import MathGrader, extract
from agentrl.types import Score, Task, Trajectory

HANGS = "\\boxed{9^{9^{9^{9^{9}}}}+1}"


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader(timeout_s=5.0)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}", "42"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{7} and \\boxed{never closed", "7"),
        (" 0.5 ", "0.5"),
        ("", ""),
    ],
)
def test_m28_the_last_box_with_balanced_braces_is_the_answer(text: str, answer: str) -> None:
    assert extract(text) == answer


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("1/2", "0.5", 1.0),
        ("so \\boxed{\\frac12}.", "0.5", 1.0),
        ("\\boxed{50\\%}", "1/2", 1.0),
        ("1,000", "1000", 1.0),
        ("$x = 5$", "5", 1.0),
        ("\\{2, 1\\}", "{1, 2}", 1.0),
        ("(2, 1)", "(1, 2)", 0.0),
        ("5\\text{ cm}", "5", 1.0),
        ("2^{10}", "1024", 1.0),
        ("2**10", "1024", 1.0),
        ("017", "17", 1.0),
        ("x^2+1", "1+x^2", 1.0),
        ("The answer is 42.", "42", 1.0),
        ("73", "7", 0.0),
        ("-3", "3", 0.0),
        ("0.33", "1/3", 0.0),
        ("I don't know", "6", 0.0),
        ("\\frac{1}{", "1", 0.0),
        ("6", "6", 1.0),
        ("18", "18 dollars", 1.0),
        ("\\text{East}", "east", 1.0),
        ("east.", "\\text{east}", 1.0),
        ("seat", "east", 0.0),
        ("west", "east", 0.0),
        ("6", "hello there", 0.0),
        ("hello there", "hello there", 1.0),
    ],
)
def test_m28_field76_answers_are_compared_as_what_they_mean(
    grader: MathGrader, answer: str, reference: str, value: float
) -> None:
    assert grader.grade(answer, [reference]).value == value


def test_any_of_several_references_counts(grader: MathGrader) -> None:
    assert grader.grade("0.5", ["7", "1/2"]).value == 1.0
    assert grader.grade("0.4", ["7", "1/2"]).value == 0.0


@pytest.mark.parametrize("reference", ["", "   ", "\\frac{1}{", "?!"])
def test_field76_a_reference_that_cannot_be_read_is_missing_and_never_a_one(grader: MathGrader, reference: str) -> None:
    for answer in ("1", "", "no idea", "\\boxed{}"):
        score = grader.grade(answer, [reference])
        assert score.missing
        assert score.reason


def test_field75_every_answer_has_one_score_in_its_place(grader: MathGrader) -> None:
    pairs = [
        ("1/2", ["0.5"]),
        ("", ["6"]),
        ("\\boxed{", ["6"]),
        ("I don't know", ["6"]),
        ("6 or 7", ["8"]),
        ("\\boxed{6}" * 50, ["6"]),
        ("x" * 100_000, ["6"]),
        ("\x00\ud800", ["6"]),
        ("6", ["6"]),
    ]
    assert [grader.grade(answer, references).value for answer, references in pairs] == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
        1.0,
        0.0,
        0.0,
        1.0,
    ]


def test_an_answer_that_hangs_the_grader_is_cut_off_and_missing_and_the_next_is_graded() -> None:
    grader = MathGrader(timeout_s=1.0)
    try:
        assert grader.grade("6", ["6"]).value == 1.0
        started = time.monotonic()
        score = grader.grade(HANGS, ["1"])
        assert time.monotonic() - started < 4.0
        assert score.missing
        assert score.reason == "grader failed: no result within 1 s"
        assert grader.grade("1/2", ["0.5"]).value == 1.0
    finally:
        grader.close()


def test_field73_grading_works_from_threads_and_from_a_loop(grader: MathGrader) -> None:
    out: list[Score] = []
    thread = threading.Thread(target=lambda: out.append(grader.grade("1/2", ["0.5"])))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(4) as pool:
        out += pool.map(lambda i: grader.grade(f"{i}/4", ["0.25"]), range(1, 5))
    assert [s.value for s in out] == [1.0, 1.0, 0.0, 0.0, 0.0]

    async def both() -> list[Score]:
        task = Task("t", "q", ("0.5",))
        answers = ("1/2", None, " ", "0.4")
        return await asyncio.gather(
            *(grader.score(task, Trajectory("t", task, 0, (), a, "ok")) for a in answers),
            grader.score(task, Trajectory("t", task, 0, (), "1/2", "failed", "broke")),
        )

    assert [s.value for s in asyncio.run(both())] == [1.0, 0.0, 0.0, 0.0, None]


def test_field73_grading_works_in_another_process() -> None:
    code = (
        "from agentrl.grading.math import MathGrader\n"
        "g = MathGrader()\n"
        "print(g.grade('1/2', ['0.5']).value, g.grade('1/3', ['0.5']).value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1.0", "0.0"]


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_no_process_outlives_the_one_that_grades_even_in_a_comparison_that_hangs() -> None:
    code = (
        "import os, threading, time\n"
        "from agentrl.grading.math import MathGrader\n"
        "g = MathGrader(timeout_s=2)\n"
        "g.grade('1', ['2'])\n"
        f"threading.Thread(target=g.grade, args=({HANGS!r}, ['1']), daemon=True).start()\n"
        "time.sleep(0.3)\n"
        "print(g._idle, flush=True)\n"
        "os.system('cat /proc/%d/task/*/children > /dev/stderr' % os.getpid())\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    children = [int(pid) for pid in done.stderr.split()]
    assert children
    end = time.monotonic() + 6.0
    while any(_alive(pid) for pid in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in children if _alive(pid)]


def test_closing_twice_is_safe_and_leaves_no_process() -> None:
    grader = MathGrader()
    grader.grade("1", ["2"])
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    before = {int(pid) for file in children for pid in file.read_text().split()}
    grader.close()
    grader.close()
    gone = [pid for pid in before if not _alive(pid)]
    assert gone
