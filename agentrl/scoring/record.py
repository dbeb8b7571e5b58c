"""Record and replay: replies in a JSON-lines file, found again by the hash of their request.

One line per request: its hash, the request as it was sent (without the API key, which is in no request), and the reply
or the fault it ended with. Under replay nothing is sent, so results are equal bit for bit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DataError
from agentrl.files import append, encode, replace_file, whole_lines


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered. `calls` is how many calls it took, failed ones included."""

    text: str
    input_tokens: int
    output_tokens: int
    finish_reason: str
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """How a request ended without a reply, after `calls` calls."""

    reason: str
    calls: int = 1


class Recorder:
    """Replies by request hash. `path` is read when it is there; `writes` appends what is new.

    While recording, a request that the file already answers is not sent again (a fault is); under replay one that the
    file does not hold is a fault.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._writes = writes
        self._known: dict[str, Reply | Fault] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        if not writes and not path.is_file():
            raise DataError(f"there is no recording {path}", "name a file that `record` wrote")
        if path.is_file():
            self._load()

    async def outcome(
        self, key: str, request: Mapping[str, Any], make: Callable[[], Awaitable[Reply | Fault]]
    ) -> Reply | Fault:
        """The recorded outcome of a request, or that of `make`, recorded. Equal requests wait for one call."""
        if not self._writes:
            return self._known.get(key) or Fault("the recording holds no such request", calls=0)
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = self._known.get(key)
            if not isinstance(known, Reply):
                known = self._known[key] = await make()
                name = "reply" if isinstance(known, Reply) else "fault"
                line = encode({"key": key, "request": request, name: asdict(known)}) + b"\n"
                append(self._path, line, durable=False)
        self._locks.pop(key, None)  # whoever comes now finds the reply
        return known

    def _load(self) -> None:
        raw = self._path.read_bytes()
        lines = whole_lines(raw)
        whole = b"".join(line + b"\n" for line in lines)
        if self._writes and whole != raw:
            replace_file(self._path, whole)
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                outcome = Reply(**entry["reply"]) if "reply" in entry else Fault(**entry["fault"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self._path}:{number} is no line of a recording ({type(error).__name__})",
                    "name a file that `record` wrote",
                ) from error
            if isinstance(outcome, Reply) or not isinstance(self._known.get(entry["key"]), Reply):
                self._known[entry["key"]] = outcome
