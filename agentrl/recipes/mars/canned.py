"""Tools that look like a recipe's and do nothing: for prompts and previews."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.protocols import Tool, ToolItem, ToolResult
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.session import tool_forms

PAGES = (
    ToolItem("first result", "The text of the first result that the tool returned."),
    ToolItem("second result", "The text of the second result."),
)


@dataclass(frozen=True, slots=True)
class CannedTool:
    """A recipe's tool by name, description and parameters; it returns two made-up pages."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(PAGES)


def canned_tools(recipe: MarsRecipe) -> dict[str, Tool]:
    """Raises `MissingError` and `ConfigError` as the real tools do."""
    return {name: CannedTool(name, *form) for name, form in tool_forms(recipe).items()}
