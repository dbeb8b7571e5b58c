"""What the two roles hear. The paper's own prompts are not public: these are ours, and a recipe may replace them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from agentrl.chat.context import Message, Part
from agentrl.chat.tool_calls import Syntax, usage
from agentrl.config.schema import AgentConfig
from agentrl.protocols import Tool

SYSTEM2_PROMPT = """You answer hard questions by research. Think step by step. When you need to know or compute \
something, call a tool; each call states its purpose: what you need to learn and why. The results are distilled for \
that purpose before you see them.

Tools:
{tools}

Call a tool like this:
{usage}

When you are sure, answer like this and call nothing more:
<answer>ANSWER</answer>"""

SYSTEM1_PROMPT = """You distil raw results for a researcher who cannot see them. Read the results and write down, \
briefly and exactly, everything in them that serves the stated purpose. Add nothing that is not there. If nothing \
serves it, write: nothing relevant"""

NOTHING_RELEVANT = "nothing relevant"
NO_RESULTS = "The tool returned no results."
ANSWER_FORM = "<answer>ANSWER</answer>"


def system2_messages(agent: AgentConfig, tools: Mapping[str, Tool], syntax: Syntax, question: str) -> list[Message]:
    """System prompt, worked examples, and the question as text from the world."""
    schemas = {name: tool.parameters for name, tool in tools.items()}
    listed = "\n".join(
        json.dumps({"name": t.name, "description": t.description, "arguments": t.parameters["properties"]})
        for t in tools.values()
    )
    prompt = agent.prompt
    if prompt is None:
        prompt = SYSTEM2_PROMPT.format(tools=listed or "none", usage=usage(syntax, schemas))
    return [*_opening(prompt, agent), Message("user", question)]


def system1_messages(
    agent: AgentConfig, template: str, items: Sequence[str], purpose: str, question: str
) -> list[Message]:
    """System 1's whole input: a function of the purpose and the bin (and the question, where a recipe shows it).

    Items are text from the world, one part each, so their tokens add up whatever stands beside them.
    """
    parts: list[Part] = []
    for literal, name, _, _ in Formatter().parse(template):
        if literal:
            parts.append(Part(literal, trusted=True))
        if name == "items":
            for i, item in enumerate(items):
                if i:
                    parts.append(Part("\n\n", trusted=True))
                parts.append(Part(item))
        elif name == "purpose":
            parts.append(Part(purpose))
        elif name == "question":
            parts.append(Part(question))
    prompt = SYSTEM1_PROMPT if agent.prompt is None else agent.prompt
    return [*_opening(prompt, agent), Message("user", tuple(parts))]


def no_action(usage: str) -> str:
    """What System 2 hears when its completion neither calls a tool nor answers. `usage` is empty without tools."""
    forms = " or ".join(form for form in (usage, ANSWER_FORM) if form)
    return f"There was neither a tool call nor an answer. The right form is: {forms}"


def item_text(template: str, index: int, header: str, text: str) -> str:
    """One raw result as System 1 sees it; `index` counts from 1 within the call."""
    return template.format(index=index, header=header, text=text)


def _opening(prompt: str, agent: AgentConfig) -> list[Message]:
    examples = [Message(turn.role, turn.content, trusted=True) for turn in agent.examples]
    return [*([Message("system", prompt, trusted=True)] if prompt else []), *examples]


def tool_schemas(tools: Mapping[str, Tool]) -> Mapping[str, Mapping[str, Any]]:
    """Tool name -> JSON schema of its arguments, as the parser takes them."""
    return {name: tool.parameters for name, tool in tools.items()}
