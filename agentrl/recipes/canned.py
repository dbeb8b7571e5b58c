"""Tools that look like a recipe's and do nothing: for prompts and previews."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.schema import BaseRecipe
from agentrl.protocols import Tool, ToolItem, ToolResult
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


def canned_tools(recipe: BaseRecipe) -> dict[str, Tool]:
    """Raises `MissingError` and `ConfigError` as the real tools do."""
    return {name: CannedTool(name, *form) for name, form in tool_forms(recipe).items()}


def example_arguments(tool: Tool) -> dict[str, Any]:
    """Arguments that fit a tool's small JSON schema."""
    return {key: _example(form) for key, form in _required(tool.parameters)}


def _required(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    properties = schema.get("properties", {})
    return [(key, properties.get(key, {})) for key in schema.get("required", ())]


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that fits a small JSON schema."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items", {}))]
    if kind == "object":
        return {key: _example(form) for key, form in _required(schema)}
    return {"string": "key words", "integer": 1, "number": 1.0, "boolean": True}.get(kind)
