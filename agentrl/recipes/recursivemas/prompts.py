"""A role's text -> ids around its slots.

Questions are text from the world and cannot write control tokens; slots are cut out of the rendered chat, inside the
user turn, so the template's one beginning and one generation prompt stay where they are.
"""

from __future__ import annotations

from string import Formatter

from agentrl.chat.context import Chat, Message, Part

TEXT_FIELDS = ("question", "instruction")


def fields_of(text: str) -> tuple[str, ...]:
    """The fields of a role's text in order. Raises `ValueError` for braces that do not match."""
    return tuple(name for _, name, _, _ in Formatter().parse(text) if name is not None)


def user_parts(text: str, question: str, instruction: str) -> tuple[Part, ...]:
    """The user turn: fields other than the question and the instruction are slots."""
    parts = []
    for literal, name, _, _ in Formatter().parse(text):
        if literal:
            parts.append(Part(literal, trusted=True))
        if name == "question":
            parts.append(Part(question))
        elif name == "instruction":
            parts.append(Part(instruction, trusted=True))
        elif name is not None:
            parts.append(Part("", slot=True))
    return tuple(parts)


def ids_around_slots(
    chat: Chat, system: str, text: str, question: str, instruction: str
) -> tuple[tuple[int, ...], ...]:
    """The chat's ids, cut at the slots. A template without a system role gets the system text in the user turn."""
    opening = [Message("system", system, trusted=True)] if system else []
    return chat.start_around([*opening, Message("user", user_parts(text, question, instruction))])
