"""Files that a team shares, through the real sandbox: bytes, one workspace per trajectory (M-08, M-21, M-22)."""

from __future__ import annotations

import asyncio
import hashlib
import time

import pytest

from agentrl.config.schema import PythonToolConfig
from agentrl.errors import MissingError
from agentrl.recipes.mappa.workspace import Workspace
from agentrl.rollout.tools.python import PythonTool
from agentrl.types import Task


@pytest.fixture(scope="module")
def python() -> PythonTool:
    tool = PythonTool(PythonToolConfig(timeout_s=20.0))
    try:
        asyncio.run(tool.sandbox.probe())
    except MissingError as error:
        pytest.skip(f"no sandbox here: {error.cause}")
    return tool


def block(code: str) -> str:
    return f"Here.\n```python\n{code}\n```"


def team(lab, **mappa):
    agents = {
        "maker": {"tools": ("python",), "must_save": ("data.bin",), "max_turns": 1},
        "reader": {"tools": ("python",), "needs": ("data.bin",), "max_turns": 1, "template": "{{question}}\n{{files}}",
                   "receives": ()},
    }  # fmt: skip
    return lab.recipe(agents, tools={"python": {}}, mappa=mappa)


MAKE = """
import hashlib, os
data = os.urandom(2000)
open("data.bin", "wb").write(data)
print(hashlib.sha256(data).hexdigest())"""
READ = """
import hashlib, os
print(hashlib.sha256(open("data.bin", "rb").read()).hexdigest(), sorted(os.listdir(".")))"""


def test_m21_in_16_rollouts_at_once_the_next_agent_reads_the_very_bytes_and_nobody_elses(roll, lab, python):
    done = roll(team(lab), {"maker": block(MAKE), "reader": block(READ)}, [python], group_size=16)
    hashes = []
    for one in done.collected.scored:
        made, read = (turn.observation.text.split()[0] for turn in one.trajectory.turns)
        assert made == read
        assert one.trajectory.turns[1].observation.text.count("'") == 2 * len(["data.bin"])
        hashes.append(made)
    assert len(set(hashes)) == 16
    assert "data.bin: saved by maker" in done.prompts("reader")[0]
    reader = done.coach.of("reader")[0]
    assert (reader.ledger["available"], reader.ledger["missing_upstream"]) == ({"data.bin": "maker"}, {})


def test_m08_a_file_that_was_not_saved_is_missing_in_prompt_and_ledger(roll, lab, python):
    done = roll(team(lab), {"maker": block("print('nothing')"), "reader": block(READ)}, [python])
    assert "data.bin: MISSING, maker should have saved it" in done.prompts("reader")[0]
    maker, reader = done.coach.views
    assert maker.ledger["missing"] == ["data.bin"]
    assert reader.ledger["missing_upstream"] == {"data.bin": "maker"}
    assert "FileNotFoundError" in reader.feedback


def test_m21_the_last_write_wins_and_a_file_of_the_workspace_may_be_the_answer(roll, lab, python):
    write = "open('data.bin', 'a').write('{}')"
    done = roll(
        team(lab, answer_file="data.bin"),
        {"maker": block(write.format("one ")), "reader": block(write.format("two"))},
        [python],
    )
    assert done.only.trajectory.answer == "one two"


def test_m22_a_program_that_never_ends_is_a_timeout_that_agent_and_coach_hear_of(roll, lab):
    tool = PythonTool(PythonToolConfig(timeout_s=1.0))
    done = roll(team(lab), {"maker": block("while True: pass"), "reader": "x"}, [tool])
    if done.coach.views[0].feedback.startswith("python failed: MissingError"):
        pytest.skip("no sandbox here")
    assert "stopped after 1 seconds" in done.coach.views[0].feedback
    assert done.only.trajectory.turns[0].observation.error in ("timeout", "cpu")
    ended = asyncio.run(tool.call({"code": "while True: pass"}))
    assert ended.info["wall_s"] <= tool.config.timeout_s + 2


@pytest.mark.parametrize(
    ("code", "statuses", "words"),
    [
        ("x = bytearray(2 << 30); x[::4096] = b'1' * len(x[::4096])", ("memory",), "memory"),
        ("import socket; socket.create_connection(('10.0.0.1', 80))", ("error",), "PermissionError"),
        ("import os\nwhile True: os.fork()", ("processes", "cpu", "timeout"), "error: the program"),
        ("open('big', 'wb').write(bytes(100 << 20))", ("error",), "OSError"),
        ("for i in range(10**6): open(str(i), 'w').close()", ("files", "error"), "file"),
    ],
    ids=["memory", "network", "forks", "disk", "many files"],
)
def test_m22_a_program_that_takes_too_much_is_an_observation_for_agent_and_coach(
    roll, lab, python, code, statuses, words
):
    agents = {"maker": {"tools": ("python",), "max_turns": 2}}
    recipe = lab.recipe(agents, tools={"python": {}})
    started = time.monotonic()
    done = roll(recipe, {"maker": [block(code), "I see."]}, [python])
    assert time.monotonic() - started < python.config.timeout_s + 2
    seen = done.only.trajectory.turns[0].observation
    assert seen.error in statuses, seen
    assert words in seen.text
    assert done.coach.views[0].feedback == seen.text
    assert words in done.prompts("maker")[1]
    assert done.only.trajectory.status == "ok"


def test_m21_agents_that_act_at_once_do_not_see_each_others_files_and_the_later_in_the_list_wins(lab):
    recipe = lab.recipe({"a": {"after": ()}, "b": {"after": ()}, "c": {"after": ("a", "b")}})
    space = Workspace.for_task(recipe, Task("q", "?"))
    first, second = (space.desk(name, recipe.agents[name]) for name in ("a", "b"))
    for desk, data in ((second, b"b"), (first, b"a")):
        desk.files["x"] = desk.saved["x"] = data
    assert first.files["x"] == b"a"
    for desk in (first, second):
        space.clear(desk)
    assert space.files == {"x": b"b"}
    assert space.ledger.saved == {"x": "b"}


def test_m21_the_tasks_own_files_lie_in_the_workspace(lab, tmp_path):
    (tmp_path / "train.csv").write_bytes(b"a,b\n1,2\n")
    recipe = lab.recipe({"a": {}})
    space = Workspace.for_task(recipe, Task("q", "?", files=(str(tmp_path / "train.csv"),)))
    assert hashlib.sha256(space.files["train.csv"]).digest() == hashlib.sha256(b"a,b\n1,2\n").digest()
    assert space.ledger.saved == {"train.csv": "task"}
