"""What the model reads back from the Python tool."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import PythonToolConfig
from agentrl.errors import MissingError
from agentrl.protocols import Tool, ToolResult
from agentrl.rollout.tools.python import PythonTool, cut_middle


def call(code: Any, **config: Any) -> tuple[str, ToolResult]:
    tool: Tool = PythonTool(PythonToolConfig(**{"timeout_s": 20, **config}))
    result = asyncio.run(tool.call({"code": code}))
    (item,) = result.items
    assert item.header == "python"
    return item.text, result


def test_a_program_answers_with_what_it_printed() -> None:
    text, result = call("import sys\nprint(6 * 7)\nprint('careful', file=sys.stderr)")
    assert text == "42\n[stderr]\ncareful"
    assert result.error is None
    assert result.info["status"] == "ok"
    assert result.info["cut_bytes"] == 0
    assert result.info["wall_s"] > 0


def test_a_silent_program_says_so() -> None:
    assert call("x = 1")[0] == "(no output)"


def test_an_error_is_text_with_its_traceback() -> None:
    text, result = call("print('before')\n1 / 0")
    assert result.error == "error"
    assert text.startswith("before\n[stderr]\nTraceback")
    assert "ZeroDivisionError" in text
    assert text.endswith("error: the program ended with exit code 1")


@pytest.mark.parametrize(
    ("code", "config", "error", "end"),
    [
        (
            "print('a')\nwhile True: pass",
            {"timeout_s": 1},
            ("timeout", "cpu"),
            "error: the program was stopped after 1 s",
        ),
        ("import time; time.sleep(60)", {"timeout_s": 0.5}, ("timeout",), "error: the program was stopped after 0.5 s"),
        ("x = [0] * 10**9", {"memory_mib": 128}, ("memory",), "error: the program needed more than 128 MiB"),
        ("import os\nwhile True: os.fork()", {}, ("processes",), "error: the program started more than 32"),
        ("while True: print('x' * 999)", {}, ("output",), "error: the program was stopped for printing more than"),
    ],
    ids=["loop", "sleep", "memory", "processes", "output"],
)
def test_a_crossed_limit_is_text(code: str, config: dict[str, Any], error: tuple[str, ...], end: str) -> None:
    text, result = call(code, **config)
    assert result.error in error
    assert text.rpartition("\n")[2].startswith(end)


def test_long_output_is_cut_in_the_middle_with_a_note() -> None:
    text, result = call("print('start', 'é' * 2000, 'end')", max_output_bytes=400)
    assert result.error is None
    assert text.startswith("start é")
    assert text.endswith("é end")
    note = next(line for line in text.splitlines() if line.startswith("[..."))
    assert note == f"[... {result.info['cut_bytes']} bytes of output cut here ...]"
    assert result.info["cut_bytes"] == len("start  end") + 4000 - 400
    assert len(text.encode()) < 400 + len(note) + 3


def test_cut_keeps_short_text_and_whole_characters() -> None:
    assert cut_middle("abc", 3) == ("abc", 0)
    text, cut = cut_middle("日本語" * 10, 10)
    assert cut == 80
    assert text.startswith("日")
    assert text.endswith("語")
    assert "\ufffd" not in text


@pytest.mark.parametrize("code", [None, 3, ["print(1)"]])
def test_a_code_that_is_no_text_is_malformed(code: Any) -> None:
    text, result = call(code)
    assert result.error == "malformed"
    assert "string" in text


def test_nothing_is_kept_between_calls() -> None:
    tool = PythonTool(PythonToolConfig())

    async def main() -> list[ToolResult]:
        first = await tool.call({"code": "open('left', 'w').write('x')"})
        return [first, await tool.call({"code": "import os; print(os.listdir())"})]

    assert asyncio.run(main())[1].items[0].text == "[]"


def test_the_schema_asks_for_code() -> None:
    tool = PythonTool(PythonToolConfig())
    assert tool.name == "python"
    assert tool.parameters["required"] == ["code"]
    assert tool.parameters["properties"]["code"]["type"] == "string"


def test_without_isolation_the_run_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(MissingError, match="bubblewrap"):
        call("print(1)")
