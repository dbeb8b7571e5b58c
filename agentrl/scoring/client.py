"""Asking a model for a judgement: bounded retries, a time limit, a concurrency limit, a budget, record and replay.

What answers is a `Backend`: an OpenAI-compatible service (`endpoint.py`) or an engine in this process (`local.py`).
A call that fails, and a reply that cannot be read, are tried again up to a limit; after that the answer is missing,
with the reason. Nothing here ever puts a number in place of one that is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from agentrl.chat.context import Message, Part
from agentrl.config.schema import ScorerConfig
from agentrl.scoring.budget import BudgetError, Meter, Usage
from agentrl.scoring.quoting import cut_middle, plain_text
from agentrl.scoring.record import Fault, Recorder, Reply

T = TypeVar("T")
_MAX_WAIT_S = 30.0
_SHOWN_REPLY_CHARS = 2_000


class CallError(Exception):
    """One call failed. `retry`: another may succeed. `free`: the service cannot have charged for it."""

    def __init__(self, reason: str, *, retry: bool, free: bool = True, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry
        self.free = free
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `schema` is the JSON schema of the reply, as text.

    `repeat` tells equal requests apart that are meant to be asked again (agreement between repeats).
    """

    messages: tuple[Message, ...]
    schema: str
    repeat: int = 0


class Backend(Protocol):
    """Something that completes a conversation."""

    async def complete(self, call: Call) -> Reply:
        """One try. Raises `CallError`."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """A parsed answer, or None with the reason.

    `info` counts calls, those of them that were tries again, replies out of form and the tokens of replies, with their
    price in US dollars (under replay: what they cost once).
    """

    value: T | None
    reason: str | None
    info: Mapping[str, Any] = field(default_factory=dict)


class ScoringClient:
    """Asks a backend under the limits of a `ScorerConfig`. Belongs to one event loop at a time.

    `model` names the model in the requests' hashes. Without a backend only a replay can answer.
    """

    def __init__(self, config: ScorerConfig, model: str, backend: Backend | None) -> None:
        self._config = config
        self._model = model
        self._backend = backend
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._recorder: Recorder | None = None
        if config.record is not None or config.replay is not None:
            self._recorder = Recorder(Path(config.record or config.replay or ""), writes=config.record is not None)
        assert backend is not None or config.replay is not None, "without a backend there must be a recording"
        self.meter = Meter(config.price, config.budget)

    async def ask(self, call: Call, parse: Callable[[str], T]) -> Asked[T]:
        """The answer that `parse` reads from the reply; `parse` raises `ValueError` for one that is out of form.

        A reply out of form is shown to the model with the fault, beside the whole case, and it is asked again.
        """
        tries = self._config.max_retries + 1
        conversation, calls, replies, unreadable, used, reason = call, 0, 0, 0, Usage(0, 0), ""
        while calls < tries:
            outcome = await self._outcome(conversation, tries - calls)
            calls += outcome.calls
            if isinstance(outcome, Fault):
                reason = outcome.reason
                break
            replies += 1
            used = Usage(used.input_tokens + outcome.input_tokens, used.output_tokens + outcome.output_tokens)
            try:
                return Asked(parse(outcome.text), None, self._info(calls, replies, unreadable, used))
            except ValueError as error:
                unreadable += 1
                cut = " (cut at max_tokens)" if outcome.finish_reason == "length" else ""
                reason = f"unreadable reply{cut}: {error}"
                conversation = _corrected(call, outcome.text, str(error))
        return Asked(None, reason, self._info(calls, replies, unreadable, used))

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()

    def _info(self, calls: int, replies: int, unreadable: int, used: Usage) -> dict[str, Any]:
        return {
            "calls": calls,
            "retries": max(0, calls - 1),
            "unreadable": unreadable,
            "input_tokens": used.input_tokens,
            "output_tokens": used.output_tokens,
            "cost_usd": self.meter.cost_usd(used, replies),
        }

    async def _outcome(self, call: Call, tries: int) -> Reply | Fault:
        if self._recorder is None:
            return await self._persist(call, tries)
        request = self.request(call)
        return await self._recorder.outcome(request_key(request), request, lambda: self._persist(call, tries))

    def request(self, call: Call) -> dict[str, Any]:
        """What identifies a call: the model, the conversation, the form of the reply, the sampling."""
        return {
            "model": self._model,
            "messages": [[m.role, plain_text(m.parts)] for m in call.messages],
            "schema": call.schema,
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
            "repeat": call.repeat,
        }

    async def _persist(self, call: Call, tries: int) -> Reply | Fault:
        """Up to `tries` calls of one conversation, with waits that double between them."""
        fault = Fault("no call was made", calls=0)
        for attempt in range(tries):
            try:
                return replace(await self._call(call), calls=attempt + 1)
            except BudgetError as error:
                return Fault(str(error), calls=attempt)
            except CallError as error:
                fault = Fault(error.reason, calls=attempt + 1)
                if not error.retry:
                    break
                if attempt + 1 < tries:
                    # Spread, so that calls that were refused together do not come back together.
                    backoff = self._config.backoff_s * 2**attempt * random.uniform(0.75, 1.25)
                    await asyncio.sleep(min(_MAX_WAIT_S, max(backoff, error.wait_s or 0.0)))
        return fault

    async def _call(self, call: Call) -> Reply:
        assert self._backend is not None
        async with self._semaphore():
            held = await self.meter.reserve(worst_usage(call, self._config.max_tokens))
            usage, free = None, False
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    reply = await self._backend.complete(call)
                if reply.input_tokens or reply.output_tokens:
                    usage = Usage(reply.input_tokens, reply.output_tokens)
                return reply
            except CallError as error:
                free = error.free
                raise
            except TimeoutError as error:
                raise CallError(f"no answer within {self._config.timeout_s:g} s", retry=True) from error
            finally:
                self.meter.settle(held, usage, free=free)

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._config.max_concurrent))
        return self._places[1]


def request_key(request: Mapping[str, Any]) -> str:
    """The hash that a recording finds a request by."""
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def worst_usage(call: Call, max_tokens: int) -> Usage:
    """More tokens than the call can have: no tokenizer makes more tokens than bytes, plus the template's own."""
    text = sum(len(plain_text(m.parts).encode("utf-8", "replace")) + 16 for m in call.messages)
    return Usage(text + len(call.schema) + 64, max_tokens)


def _corrected(call: Call, reply: str, fault: str) -> Call:
    keys = ", ".join(f'"{name}"' for name in json.loads(call.schema).get("properties", {}))
    ask = f"That reply cannot be read ({fault}). Answer again, with nothing but one JSON object with the keys {keys}."
    said = Message("assistant", (Part(cut_middle(reply, _SHOWN_REPLY_CHARS) or "(empty)"),))
    return replace(call, messages=(*call.messages, said, Message("user", (Part(ask, trusted=True),))))
