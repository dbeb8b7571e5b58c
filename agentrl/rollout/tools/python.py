"""The tool `python`: a program the model wrote, run in the sandbox, answered with what it printed.

A program that fails, runs too long or takes too much is an answer the model reads, never an exception here. Only a
machine that cannot isolate at all ends the run (`MissingError`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agentrl.config.schema import PythonToolConfig
from agentrl.protocols import ToolItem, ToolResult
from agentrl.sandbox import Limits, Result, Sandbox

# The program may print more than the model is shown, so that a long print is cut rather than its program ended.
_PRINT_FACTOR = 16


class PythonTool:
    """Runs `code` as a fresh program each time: no state survives from call to call, there is no network."""

    name = "python"
    description = (
        "Run a Python 3 program in an isolated sandbox and read what it prints. Each call starts afresh: nothing is "
        "kept between calls, and there is no network. Use print() for everything you want to see."
    )
    parameters: Mapping[str, Any] = MappingProxyType(
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the complete program"}},
            "required": ["code"],
            "additionalProperties": False,
        }
    )

    def __init__(self, config: PythonToolConfig) -> None:
        self.config = config
        limits = Limits(
            wall_s=config.timeout_s,
            cpu_s=config.timeout_s,
            memory_mib=config.memory_mib,
            workspace_mib=config.workspace_mib,
            file_mib=config.workspace_mib // 2,
            output_bytes=config.max_output_bytes * _PRINT_FACTOR,
        )
        self.sandbox = Sandbox(limits, config.max_concurrent)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Run `arguments["code"]`. One item: stdout, then stderr, then a line on how it ended if it ended badly.

        `error` is the sandbox's status ("error", "timeout", "cpu", "memory", "processes", "output", "files") or
        "malformed". `info` holds status, returncode, wall_s, queue_s and cut_bytes.

        Raises:
            MissingError: this machine cannot isolate a program.
            RunFailedError: the sandbox's supervisor broke.
        """
        result, _ = await self.call_with(arguments)
        return result

    async def call_with(
        self, arguments: Mapping[str, Any], files: Mapping[str, bytes] | None = None, collect: Sequence[str] = ()
    ) -> tuple[ToolResult, Mapping[str, bytes]]:
        """As `call`, with `files` in the program's folder; also the bytes of those that match `collect` afterwards."""
        code = arguments.get("code")
        if not isinstance(code, str):
            text = 'error: the argument "code" must be a string that holds the program'
            return ToolResult((ToolItem(self.name, text),), error="malformed"), {}
        result = await self.sandbox.run(code, files, collect)
        text, cut_bytes = cut_middle(_shown(result), self.config.max_output_bytes)
        end = self._end_line(result)
        info = {
            "status": result.status,
            "returncode": result.returncode,
            "wall_s": result.wall_s,
            "queue_s": result.queue_s,
            "cut_bytes": cut_bytes,
        }
        item = ToolItem(self.name, "\n".join(part for part in (text, end) if part) or "(no output)")
        error = None if result.status == "ok" else result.status
        return ToolResult((item,), error=error, info=info), result.files

    def _end_line(self, result: Result) -> str:
        limits = self.sandbox.limits
        match result.status:
            case "ok":
                return ""
            case "error":
                return f"error: the program ended with exit code {result.returncode}"
            case "timeout":
                return f"error: the program was stopped after {limits.wall_s:g} seconds"
            case "cpu":
                return f"error: the program was stopped after {limits.cpu_s:g} seconds of CPU time"
            case "memory":
                return f"error: the program needed more than {limits.memory_mib} MiB of memory"
            case "processes":
                return f"error: the program started more than {limits.processes} processes and threads"
            case "output":
                return f"error: the program was stopped for printing more than {limits.output_bytes} bytes"
            case "files":
                return "error: the program was stopped for creating too many files"


def _shown(result: Result) -> str:
    stdout, stderr = result.stdout.rstrip("\n"), result.stderr.rstrip("\n")
    return "\n".join(part for part in (stdout, f"[stderr]\n{stderr}" if stderr else "") if part)


def cut_middle(text: str, max_bytes: int) -> tuple[str, int]:
    """`text` within `max_bytes` of UTF-8 (apart from the note that names the cut), and how many bytes went.

    Beginning and end stay, because results tend to open the output and errors to close it.
    """
    raw = text.encode(errors="replace")
    if len(raw) <= max_bytes:
        return text, 0
    head, tail = raw[: max_bytes - max_bytes // 2], raw[len(raw) - max_bytes // 2 :]
    cut = len(raw) - max_bytes
    note = f"\n[... {cut} bytes of output cut here ...]\n"
    return head.decode(errors="ignore") + note + tail.decode(errors="ignore"), cut
