"""How text from agents and the world is shown to a judge or a coach: as data that cannot pass for instructions.

Every quoted text stands between two lines that carry a boundary. The boundary is a hash of all texts of the request,
so no text can contain its own, and the same request always has the same one (replay, deterministic engines). Texts
are capped, and what a chat template would read as control tokens is broken up where it cannot be encoded apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from agentrl.chat.context import Part
from agentrl.errors import ConfigError

_CONTROL = re.compile(
    r"<(?=[|｜])|<(?=/?(?:s|bos|eos|pad|unk|think|tool_call|tool_response|start_of_turn|end_of_turn)>)"
    r"|\[(?=/?INST\])|<(?=</?SYS>>)"
)
_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


def boundary(texts: Sequence[str], salt: str = "") -> str:
    """8 hex digits that no text can foresee, because they hash all of the texts: a guess is right once in 2^32."""
    digest = hashlib.blake2b(key=salt.encode()[:64], digest_size=4)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def cut_middle(text: str, max_chars: int) -> str:
    """`text` within `max_chars` characters, not counting the note that says how many were cut from its middle."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    cut = len(text) - max_chars
    return f"{text[: max_chars - tail]}\n[... {cut} characters cut here ...]\n{text[len(text) - tail :]}"


def quoted(name: str, text: str, mark: str, max_chars: int) -> tuple[Part, ...]:
    """A named block: our two lines around text that is not ours."""
    return (
        Part(f"[BEGIN {name} {mark}]\n", trusted=True),
        Part(cut_middle(text, max_chars)),
        Part(f"\n[END {name} {mark}]", trusted=True),
    )


def plain_text(parts: Sequence[Part]) -> str:
    """The parts as one string for a service that renders its own template: control tokens in quoted text are broken
    up by a space, because such a service encodes them as what they name."""
    return "".join(part.text if part.trusted else _CONTROL.sub(lambda m: m.group() + " ", part.text) for part in parts)


class Template:
    """A prompt with `{{name}}` variables. Single braces, and doubled ones around anything but a name, are literal.

    Values are put in once and never read as templates themselves. Raises `ConfigError` naming `key` for a variable
    that does not exist and for one of `required` that the text lacks, each time listing those there are.
    """

    def __init__(self, text: str, *, known: Sequence[str], required: Sequence[str], key: str) -> None:
        self._key = key
        self._known = tuple(known)
        self._pieces = _VARIABLE.split(text)
        self.variables = tuple(dict.fromkeys(self._pieces[1::2]))
        for name in self.variables:
            if name not in known:
                raise ConfigError(f"{key}: there is no variable {{{{{name}}}}}", f"available: {self._available()}")
        missing = [name for name in required if name not in self.variables]
        if missing:
            raise ConfigError(
                f"{key}: the variable {{{{{missing[0]}}}}} is missing", f"add it; available: {self._available()}"
            )

    def render(self, values: Mapping[str, Sequence[Part]]) -> tuple[Part, ...]:
        """The parts of the prompt. Raises `ConfigError` for a variable without a value."""
        parts: list[Part] = []
        for place, piece in enumerate(self._pieces):
            if place % 2 == 0:
                if piece:
                    parts.append(Part(piece, trusted=True))
            elif piece in values:
                parts.extend(values[piece])
            else:
                given = ", ".join(sorted(values))
                raise ConfigError(f"{self._key}: no value for {{{{{piece}}}}}", f"available: {given}")
        return tuple(parts)

    def _available(self) -> str:
        return ", ".join(f"{{{{{name}}}}}" for name in self._known)
