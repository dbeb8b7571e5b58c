"""The process that math answers are compared in. It speaks JSON lines and imports nothing of the project.

Symbolic algebra can run for ever inside one C call, where neither threads nor Python signal handlers help. So each
request arms a timer whose signal ends the process by the kernel's hand: that is the time limit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

_MEMORY_BYTES = 2 << 30
_WORDY = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` with balanced braces; None where there is none."""
    at = text.rfind("\\boxed{")
    while at >= 0:
        start, depth = at + len("\\boxed{"), 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
        at = text.rfind("\\boxed{", 0, at)
    return None


def parsed(text: str) -> list[Any]:
    """What the text can mean as mathematics; empty where it cannot. Prose is searched for its last expression."""
    from math_verify import parse

    boxed = last_boxed(text)
    formula = (boxed if boxed is not None else text).strip().strip("$").replace("**", "^").rstrip(".")
    prose = boxed is None and _WORDY.search(text) is not None
    found: list[Any] = parse(text if prose else f"\\boxed{{{formula}}}", parsing_timeout=None)
    return [one for one in found if not isinstance(one, str)]


def compare(answer: str, references: list[str]) -> list[bool | None]:
    """Per reference whether the answer equals it, None where the reference is no mathematics."""
    from math_verify import verify

    said = parsed(answer)
    out: list[bool | None] = []
    for reference in references:
        gold = parsed(reference)
        out.append(bool(said) and bool(verify(gold, said, timeout_seconds=None)) if gold else None)
    return out


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library that prints must not speak for us
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    compare("1/2", ["0.5"])  # imports and first-use tables, outside of any limit
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        try:
            reply: dict[str, Any] = {"equal": compare(request["answer"], request["references"])}
        except Exception as error:  # noqa: BLE001 - whatever a parser raises is told, and graded as missing
            reply = {"fault": type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
