"""Contexts that grow append-only in token space.

A template is rendered with placeholders in place of untrusted contents and cut there: its own pieces are encoded with
added tokens, contents as text from the world. Later turns are appended as ids: what the template puts between an
assistant's content and the next turn's is found once, by the difference of placeholder renders. Sampled ids are never
decoded and re-encoded, and old turns are never rendered again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.chat.format import ChatFormat, TemplateRefusal
from agentrl.errors import ConfigError

Tools = Sequence[Mapping[str, Any]]
ObservationRole = Literal["tool", "user"]
Runs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a message. Only trusted text (ours, never the world's) may write control tokens. A `slot` has no
    text: it is a place for embeddings, where `Chat.start_around` cuts."""

    text: str
    trusted: bool = False
    slot: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is text that is trusted or not as a whole, or parts that each say so."""

    role: str
    content: str | tuple[Part, ...]
    trusted: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.content, self.trusted),) if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """What the environment appends after a completion, around the world's texts.

    `opening` starts with the end marker of the assistant's turn; `closed_opening` is for completions that sampled
    it. `between` stands between two texts, `closing` ends the turn and holds the generation prompt.
    """

    opening: tuple[int, ...]
    closed_opening: tuple[int, ...]
    between: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]


@dataclass(slots=True)
class _Placeholders:
    """Hands out strings that occur nowhere in the trusted texts, and cuts a render at them."""

    nonce: str
    texts: list[str] = field(default_factory=list)

    @classmethod
    def avoiding(cls, texts: Sequence[str]) -> _Placeholders:
        whole = "\n".join(texts)
        return cls(next(n for i in range(len(whole) + 1) if (n := f"AgentrlSlot{i}x") not in whole))

    def hold(self, text: str) -> str:
        self.texts.append(text)
        return f"{self.nonce}{len(self.texts) - 1}z"

    def cut(self, render: str) -> tuple[list[str], list[int]]:
        """The template's pieces, one more than places, and the index of the text at each place."""
        pieces = re.split(f"{self.nonce}([0-9]+)z", render)
        order = [int(i) for i in pieces[1::2]]
        for i in range(len(self.texts)):
            count = order.count(i)
            if count != 1:
                what = "leaves out" if count == 0 else f"repeats {count} times"
                raise TemplateRefusal(f"the template {what} or changes an untrusted content")
        return pieces[0::2], order


class Chat:
    """How one agent's conversations are put into ids: a format, its tools, its thinking switch. Shared and immutable;
    frames are derived on first use and kept."""

    def __init__(self, format: ChatFormat, tools: Tools | None = None, enable_thinking: bool | None = None) -> None:
        self.format = format
        self.tools = tools
        self.enable_thinking = enable_thinking
        self._frames: dict[tuple[str, int, bool], TurnFrame] = {}
        self._merges_system: bool | None = None
        self._tool_role: bool | None = None

    def start(self, messages: Sequence[Message], generation_prompt: bool = True) -> tuple[int, ...]:
        """Ids of a conversation's beginning. Its length is what a budget must count.

        A system message goes into the first user turn where the template refuses or drops the role. Raises
        `ConfigError` with the template's reason when it refuses the messages, or leaves an untrusted content out,
        repeats or changes it.
        """
        (ids,) = self._assemble(messages, generation_prompt)
        return ids

    def start_around(self, messages: Sequence[Message], generation_prompt: bool = True) -> Runs:
        """As `start`, cut at the slots in order: one run of ids more than there are slots. Raises as `start`."""
        return self._assemble(messages, generation_prompt)

    def open(self, messages: Sequence[Message]) -> Context:
        """A context that ends with the generation prompt. Raises as `start` does."""
        return Context(self, self.start(messages))

    def observation_delta(
        self,
        completion_ids: Sequence[int],
        texts: str | Sequence[str],
        role: ObservationRole = "tool",
        trusted: bool = False,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """What the environment appends after a completion: end of turn, if it was not sampled, the answer's turn and
        the generation prompt.

        Several `texts` are the replies to several calls of one turn, in order. `trusted` is for our own words (a
        reminder to answer). Costs the length of the delta, not of the context. Raises `ConfigError` when the template
        has no such turn.
        """
        texts = (texts,) if isinstance(texts, str) else tuple(texts)
        frame = self.frame(role, len(texts), generation_prompt)
        sampled = self.format.sampled_end(completion_ids)
        skip = self.format.sampled_marker(completion_ids)
        marker = self.format.end_of_turn.marker
        if skip and skip == len(marker):
            ids = list(frame.closed_opening)
        elif not marker and sampled and frame.opening[:1] == tuple(completion_ids[-1:]):
            # Some templates end a turn by opening the next one, whose first token was then sampled.
            ids = list(frame.opening[1:])
        else:
            ids = list(frame.opening[skip:])
        for i, text in enumerate(texts):
            if i:
                ids.extend(frame.between[i - 1])
            ids.extend(self.format.encode_trusted(text, continues=True) if trusted else self.format.encode_world(text))
        ids.extend(frame.closing)
        return tuple(ids)

    def frame(self, role: ObservationRole, num_texts: int = 1, generation_prompt: bool = True) -> TurnFrame:
        """The frame of an observation of `num_texts` texts. A template without a tool role gets a user turn with
        `<tool_response>` around each text."""
        key = (role, num_texts, generation_prompt)
        if key not in self._frames:
            self._frames[key] = self._derive_frame(role, num_texts, generation_prompt)
        return self._frames[key]

    @property
    def has_tool_role(self) -> bool:
        """Whether the template was written for tool turns and prints them right after an assistant's."""
        if self._tool_role is None:
            self._tool_role = self.format.mentions("tool", self.tools is not None)
            if self._tool_role:
                try:
                    self._frame_pieces([("tool", ("",), ("",))], 1, True)
                except TemplateRefusal:
                    self._tool_role = False
        return self._tool_role

    # Internals

    def _render(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool) -> str:
        return self.format.render(messages, self.tools, generation_prompt, self.enable_thinking)

    def _derive_frame(self, role: ObservationRole, num_texts: int, generation_prompt: bool) -> TurnFrame:
        turns: list[tuple[str, Sequence[str], Sequence[str]]]
        if role == "tool" and self.has_tool_role:
            turns = [("tool", ("",), ("",))] * num_texts
        elif role == "tool":
            before = ("<tool_response>\n", *["\n</tool_response>\n<tool_response>\n"] * (num_texts - 1))
            turns = [("user", before, ("\n</tool_response>",))]
        else:
            turns = [("user", ("", *["\n\n"] * (num_texts - 1)), ("",))]
        try:
            pieces = self._frame_pieces(turns, num_texts, generation_prompt)
        except TemplateRefusal as refusal:
            raise ConfigError(
                f"the chat template has no {role} turn after an assistant's: {refusal}",
                "use a model whose template holds several turns",
            ) from refusal
        encode = self.format.encode_trusted
        opening, *between, closing = [encode(piece, continues=True) for piece in pieces]
        marker = self.format.end_of_turn.marker
        if opening[: len(marker)] == marker:
            closed = opening[len(marker) :]
        else:
            # The marker is plain text that merges with what follows it; written alone, it is left out alone.
            text = self.format.decode(marker)
            closed = encode(pieces[0].removeprefix(text), continues=True)
            opening = marker + closed if pieces[0].startswith(text) else opening
        return TurnFrame(opening, closed, tuple(between), closing)

    def _frame_pieces(
        self, turns: Sequence[tuple[str, Sequence[str], Sequence[str]]], num_texts: int, generation_prompt: bool
    ) -> list[str]:
        """Template text before, between and after `num_texts` texts that follow an assistant's content."""
        slots = _Placeholders.avoiding([])
        messages = [{"role": "user", "content": slots.hold("")}, {"role": "assistant", "content": slots.hold("")}]
        for role, before, after in turns:
            content = "".join(text + slots.hold("") for text in before) + "".join(after)
            messages.append({"role": role, "content": content})
        pieces, order = slots.cut(self._render(messages, generation_prompt))
        if order != list(range(num_texts + 2)):
            raise TemplateRefusal("the template changes the order of turns")
        return pieces[2:]

    def _assemble(self, messages: Sequence[Message], generation_prompt: bool) -> Runs:
        try:
            return self._cut_and_encode(self._placed(messages), generation_prompt)
        except TemplateRefusal as refusal:
            roles = ", ".join(m.role for m in messages)
            raise ConfigError(
                f"the chat template cannot hold these messages ({roles}): {refusal}",
                "use roles and an order that the model's template knows, or another model",
            ) from refusal

    def _cut_and_encode(self, messages: Sequence[Message], generation_prompt: bool) -> Runs:
        parts = [part for m in messages for part in m.parts]
        slots = _Placeholders.avoiding([p.text for p in parts])
        dicts: list[dict[str, str]] = []
        places: set[int] = set()
        for message in messages:
            content = []
            for part in message.parts:
                if part.slot:
                    places.add(len(slots.texts))
                    content.append(slots.hold(""))
                elif part.trusted:
                    content.append(part.text)
                else:
                    content.append(slots.hold(part.text))
            dicts.append({"role": message.role, "content": "".join(content)})
        pieces, order = slots.cut(self._render(dicts, generation_prompt))
        runs: list[list[int]] = [[]]
        for i, piece in enumerate(pieces):
            if i and order[i - 1] in places:
                runs.append([])
            elif i:
                runs[-1].extend(self.format.encode_world(slots.texts[order[i - 1]]))
            if piece:
                runs[-1].extend(self.format.encode_trusted(piece, continues=i > 0))
        return tuple(tuple(run) for run in runs)

    def _placed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as the template can hold them: a system message merged into the first user turn, tool turns as
        user turns, if need be."""
        if any(m.role == "tool" for m in messages) and not self.has_tool_role:
            messages = _tools_as_users(messages)
        if not messages or messages[0].role != "system" or not self._system_must_merge():
            return messages
        system, *rest = messages
        place = next((i for i, m in enumerate(rest) if m.role == "user"), None)
        if place is None:
            return [Message("user", system.parts), *rest]
        user = rest[place]
        rest[place] = Message("user", (*system.parts, Part("\n\n", trusted=True), *user.parts))
        return rest

    def _system_must_merge(self) -> bool:
        if self._merges_system is None:
            slots = _Placeholders.avoiding([])
            messages = [{"role": "system", "content": slots.hold("")}, {"role": "user", "content": slots.hold("")}]
            try:
                slots.cut(self._render(messages, True))
                self._merges_system = False
            except TemplateRefusal:
                self._merges_system = True
        return self._merges_system


def _tools_as_users(messages: Sequence[Message]) -> list[Message]:
    """Each run of tool messages as one user message with `<tool_response>` around every text."""
    out: list[Message] = []
    for i, message in enumerate(messages):
        if message.role != "tool":
            out.append(message)
            continue
        follows = i > 0 and messages[i - 1].role == "tool"
        earlier = (*out.pop().parts, Part("\n", trusted=True)) if follows else ()
        opening, closing = Part("<tool_response>\n", trusted=True), Part("\n</tool_response>", trusted=True)
        out.append(Message("user", (*earlier, opening, *message.parts, closing)))
    return out


@dataclass(frozen=True, slots=True)
class Context:
    """Everything one agent has seen and said, as ids. `sampled` holds [start, stop) of each completion, in order."""

    chat: Chat
    ids: tuple[int, ...]
    sampled: tuple[tuple[int, int], ...] = ()

    def after_completion(self, ids: Sequence[int]) -> Context:
        """The context with a completion's sampled ids, kept as they are."""
        start = len(self.ids)
        return Context(self.chat, self.ids + tuple(ids), (*self.sampled, (start, start + len(ids))))

    def observation_delta(
        self,
        texts: str | Sequence[str],
        role: ObservationRole = "tool",
        trusted: bool = False,
        generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """`Chat.observation_delta` after the last completion: measure it against a budget, then `append` it."""
        start, stop = self.sampled[-1]
        assert stop == len(self.ids), "an observation follows a completion"
        return self.chat.observation_delta(self.ids[start:stop], texts, role, trusted, generation_prompt)

    def append(self, delta: Sequence[int]) -> Context:
        """The context with ids that nobody sampled."""
        return Context(self.chat, self.ids + tuple(delta), self.sampled)
