"""What rendering a conversation anew would do to its old turns, compared with a context that only grows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.context import Chat, Message, ObservationRole, Tools
from agentrl.chat.format import ChatFormat
from agentrl.errors import ConfigError


def append_only_ok(format: ChatFormat, tools: Tools | None = None, enable_thinking: bool | None = None) -> str | None:
    """Whether this template, rendered anew, would keep what was appended: None if so, else which turn it changes.

    Information for the dry run: our contexts are append-only either way. Tried on three turns of plain text, of
    thinking, and of a tool call with its reply.
    """
    chat = Chat(format, tools, enable_thinking)
    tries = {
        "plain turns": ("first", "second"),
        "earlier thinking": ("<think>\nwhy\n</think>\n\nfirst", "<think>\nhow\n</think>\n\nsecond"),
        "a tool call": ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "second"),
    }
    for name, replies in tries.items():
        for role in ("user", "tool") if name == "a tool call" else ("user",):
            if (turn := _changed_turn(chat, replies, role)) is not None:
                return f"re-rendering the template would change {name} (turn {turn}, before a {role} turn)"
    return None


def _changed_turn(chat: Chat, replies: Sequence[str], role: ObservationRole) -> int | None:
    """The first turn whose text a new render changes, compared with the append-only context."""
    messages = [Message("user", "ask", trusted=True)]
    context = chat.open(messages)
    # Where the generation prompt opens the thinking, the completion only closes it.
    opened = re.search(r"<think>\s*$", chat.format.decode(context.ids[-16:])) is not None
    for turn, reply in enumerate(replies, start=1):
        whole = f"<think>\n\n</think>\n\n{reply}" if opened and not reply.startswith("<think>") else reply
        said = whole.removeprefix("<think>").lstrip("\n") if opened else whole
        context = context.after_completion(chat.format.encode_trusted(said, continues=True))
        context = context.append(context.observation_delta("next", role, trusted=True))
        messages += [Message("assistant", whole, trusted=True), Message(role, "next", trusted=True)]
        try:
            again = chat.start(messages)
        except ConfigError:
            return turn
        if chat.format.decode(again) != chat.format.decode(context.ids):
            return turn
    return None
