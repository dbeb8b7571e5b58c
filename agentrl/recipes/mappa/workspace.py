"""The files that a team hands from agent to agent, one workspace per trajectory (MAPPA M-21).

Files are bytes and are never opened here. An agent at work has a desk: the workspace as it stood when its stage began,
and what it has saved since. Desks are cleared in the order of the recipe, so that of agents that act at once the later
one in the list wins, however fast either was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError
from agentrl.protocols import Tool, ToolResult
from agentrl.recipes.mappa.config import MappaRecipe, TeamAgentConfig
from agentrl.rollout.tools.python import PythonTool
from agentrl.scoring.ledger import TASK, FileLedger
from agentrl.types import Task


@dataclass(slots=True)
class Workspace:
    """Files by name, and the ledger of who saved them."""

    files: dict[str, bytes]
    ledger: FileLedger

    @classmethod
    def for_task(cls, recipe: MappaRecipe, task: Task) -> Workspace:
        """The task's own files under their bare names. Raises `DataError` for one that cannot be read."""
        files: dict[str, bytes] = {}
        for name in task.files:
            try:
                files[Path(name).name] = Path(name).read_bytes()
            except OSError as error:
                raise DataError(f"task {task.id}: cannot read {name}: {error}", "mend the task's files") from error
        ledger = FileLedger(
            required={name: agent.must_save for name, agent in recipe.agents.items() if agent.must_save},
            saved=dict.fromkeys(files, TASK),
            needs={name: agent.needs for name, agent in recipe.agents.items() if agent.needs},
        )
        return cls(files, ledger)

    def desk(self, name: str, agent: TeamAgentConfig) -> Desk:
        made = {file for file, who in self.ledger.saved.items() if who != TASK}
        return Desk(name, dict(self.files), self.ledger, (*agent.must_save, *agent.collect, *sorted(made)))

    def clear(self, desk: Desk) -> None:
        """Take over what an agent saved; it has finished."""
        self.files |= desk.saved
        self.ledger = self.ledger.after(desk.agent, desk.saved, finished=True)


class Desk:
    """One agent's view of the workspace while it acts. `collect` are names and patterns that come back from a call."""

    def __init__(self, agent: str, files: dict[str, bytes], ledger: FileLedger, collect: Sequence[str]) -> None:
        self.agent = agent
        self.files = files
        self.saved: dict[str, bytes] = {}
        self._ledger = ledger
        self._collect = tuple(dict.fromkeys(collect))

    @property
    def ledger(self) -> FileLedger:
        return self._ledger.after(self.agent, self.saved)

    def bound(self, tool: Tool | None) -> Tool | None:
        """The tool at this desk: Python runs among its files and leaves them there; other tools are as they are."""
        return _PythonAtDesk(tool, self) if isinstance(tool, PythonTool) else tool

    async def run(self, tool: PythonTool, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a program; files that it made or changed are saved, even where it failed later on."""
        result, files = await tool.call_with(arguments, self.files, self._collect)
        changed = {name: data for name, data in files.items() if self.files.get(name) != data}
        self.files |= changed
        self.saved |= changed
        return result


class _PythonAtDesk:
    def __init__(self, tool: PythonTool, desk: Desk) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self._tool, self._desk = tool, desk

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._desk.run(self._tool, arguments)
