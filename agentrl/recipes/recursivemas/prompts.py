"""A role's text -> ids around its slots.

Questions are text from the world and cannot write control tokens; slots are cut out of the rendered chat, inside the
user turn, so the template's one beginning and one generation prompt stay where they are.
"""

from __future__ import annotations

from string import Formatter

from agentrl.chat.context import Chat, Message, Part
from agentrl.errors import DataError
from agentrl.types import Task

_TEXTS = ("question", "instruction")
_TASK = "task."


def fields_of(text: str) -> tuple[str, ...]:
    """The fields of a role's text in order. Raises `ValueError` for braces that do not match."""
    return tuple(name for _, name, _, _ in Formatter().parse(text) if name is not None)


def slots_in(text: str) -> tuple[str, ...]:
    """The fields that are slots, in order: all but {question}, {instruction} and {task.KEY}."""
    return tuple(name for name in fields_of(text) if name not in _TEXTS and not name.startswith(_TASK))


def task_fields_in(text: str) -> tuple[str, ...]:
    """The fields {task.KEY} of a role's text, each once, in order."""
    return tuple(dict.fromkeys(name for name in fields_of(text) if name.startswith(_TASK)))


def user_parts(text: str, task: Task, instruction: str) -> tuple[Part, ...]:
    """The user turn. Raises `DataError` when the task lacks a field that the text names."""
    parts = []
    for literal, name, _, _ in Formatter().parse(text):
        if literal:
            parts.append(Part(literal, trusted=True))
        if name == "question":
            parts.append(Part(task.question))
        elif name == "instruction":
            parts.append(Part(instruction, trusted=True))
        elif name is not None and name.startswith(_TASK):
            key = name.removeprefix(_TASK)
            if key not in task.info:
                have = ", ".join(sorted(task.info)) or "none"
                raise DataError(
                    f"task {task.id} has no field {key!r}, which a prompt names as {{{name}}}", f"it has {have}"
                )
            parts.append(Part(str(task.info[key])))
        elif name is not None:
            parts.append(Part("", slot=True))
    return tuple(parts)


def ids_around_slots(chat: Chat, system: str, text: str, task: Task, instruction: str) -> tuple[tuple[int, ...], ...]:
    """The chat's ids, cut at the slots. A template without a system role gets the system text in the user turn."""
    opening = [Message("system", system, trusted=True)] if system else []
    return chat.start_around([*opening, Message("user", user_parts(text, task, instruction))])
