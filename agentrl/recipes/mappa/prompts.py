"""What the agents of a team hear: who they are, the task, and what was handed to them. All words here are ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.chat.context import Message, Part
from agentrl.chat.tool_calls import Tools, usage
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.scoring.quoting import Template

PYTHON_FORM = "```python\nPROGRAM\n```"

_SYSTEM = """\
You are {name}, one agent of a team that solves a task together. Your role: {role}.
The team, in order: {team}. The answer of {answers} is the team's answer.{files}{tools}"""
_FILES = """
You share a folder of files with the team.{must_save}"""
_MUST_SAVE = " You must save: {names}."
_TOOLS = """
You may call tools. Call one like this: {usage}
Its result comes back to you. When you need no tool, say so by calling none."""


def system_prompt(recipe: MappaRecipe, name: str, tools: Tools) -> str:
    """The agent's own prompt, or ours: its role, the team, its files and tools."""
    agent = recipe.agents[name]
    if agent.prompt is not None:
        return agent.prompt
    team = "; ".join(f"{other} {config.role}" for other, config in recipe.agents.items())
    must_save = _MUST_SAVE.format(names=", ".join(agent.must_save)) if agent.must_save else ""
    has_files = "python" in agent.tools
    forms = usage("hermes", tools, require_purpose=False)
    if "python" in tools:
        forms = f"{forms}, or a program in a block:\n{PYTHON_FORM}"
    return _SYSTEM.format(
        name=name,
        role=agent.role,
        team=team,
        answers=recipe.answers,
        files=_FILES.format(must_save=must_save) if has_files else "",
        tools=_TOOLS.format(usage=forms) if tools else "",
    )


def opening(
    recipe: MappaRecipe,
    name: str,
    tools: Tools,
    *,
    question: str,
    received: Mapping[str, str],
    files: str,
    loop_round: int,
) -> list[Message]:
    """System prompt, worked examples, and the user turn of the agent's template.

    `received` holds what each agent handed over, in order; one that has not acted yet hands over nothing.
    """
    agent = recipe.agents[name]
    prompt = system_prompt(recipe, name, tools)
    messages = [Message("system", prompt, trusted=True)] if prompt else []
    messages += [Message(turn.role, turn.content, trusted=True) for turn in agent.examples]
    known = ("question", "received", "files", "loop_round", *received)
    template = Template(agent.template, known=known, required=(), key=f"agents.{name}.template")
    values: dict[str, Sequence[Part]] = {other: (Part(text),) for other, text in received.items()}
    values |= {
        "question": (Part(question),),
        "received": _handed_over(received),
        "files": (Part(files),),
        "loop_round": (Part(str(loop_round), trusted=True),),
    }
    parts = template.render(values)
    # What stands at the very end of a turn may be nothing but the gap before an empty variable.
    while parts and not parts[-1].text.strip():
        parts = parts[:-1]
    return [*messages, Message("user", parts)]


def _handed_over(received: Mapping[str, str]) -> tuple[Part, ...]:
    parts: list[Part] = []
    for other, text in received.items():
        if text:
            parts.append(Part(f"{'' if not parts else chr(10) * 2}From {other}:\n", trusted=True))
            parts.append(Part(text))
    return tuple(parts)
