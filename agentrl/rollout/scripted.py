"""The scripted engine: completions written by a function instead of a model.

Small enough to reason about, and honest where it matters: replies become token ids of the policy's real tokenizer,
stops, limits and grammars hold as in any engine, and log-probabilities are those of a uniform policy.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, EngineError
from agentrl.grammar import GrammarFactory, GrammarViolationError
from agentrl.protocols import WeightSource
from agentrl.rollout.faults import PromptTooLongError
from agentrl.rollout.gate import Gate
from agentrl.rollout.queue import GateQueue, Pending
from agentrl.types import Completion, Embeddings, Prompt, Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Reply = Callable[[Request, str], str | tuple[int, ...]]
"""Answers a request, given the prompt's text, with text or token ids."""


@dataclass(frozen=True, slots=True)
class ScriptedPolicy:
    """The tokens of a policy without its weights. The first of `eos_ids` ends a reply that ends by itself."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: tuple[int, ...]
    grammar: GrammarFactory


class ScriptedEngine:
    """Serves replies of a function. Implements `agentrl.protocols.Engine`.

    Each token's log-probability is `logprob`, by default -log of the number of tokens that were allowed there; forced
    tokens have 0. `latency_s` delays every completion. With `deterministic`, replies are made in the requests' order
    (their keys) whenever every live coroutine waits; else at once. `requests` holds all requests in that order.
    """

    def __init__(
        self,
        reply: Reply,
        policies: Mapping[str, ScriptedPolicy],
        *,
        gate: Gate,
        deterministic: bool = False,
        logprob: float | None = None,
        latency_s: float = 0.0,
        max_model_len: int | None = None,
    ) -> None:
        self._reply = reply
        self._policies = dict(policies)
        self._versions = dict.fromkeys(policies, 0)
        self._logprob = logprob
        self._latency_s = latency_s
        self._window = max_model_len
        self._queue: GateQueue[Request] = GateQueue(gate, self._serve, full=None if deterministic else 1)
        self.requests: list[Request] = []

    @classmethod
    def from_folders(
        cls,
        reply: Reply,
        folders: Mapping[str, Path],
        *,
        gate: Gate,
        deterministic: bool = False,
        max_model_len: int | None = None,
    ) -> ScriptedEngine:
        """An engine with the tokenizers of model folders."""
        from tokenizers import Tokenizer

        policies = {}
        for name, folder in folders.items():
            grammar = GrammarFactory.from_folder(folder)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            policies[name] = ScriptedPolicy(tokenizer, grammar.vocab_size, grammar.eos_ids, grammar)
        return cls(reply, policies, gate=gate, deterministic=deterministic, max_model_len=max_model_len)

    async def generate(self, request: Request) -> Completion:
        """The scripted completion. Raises `EngineError` when the reply breaks the request's grammar,
        `PromptTooLongError` when the prompt leaves no room in the window, and whatever the script raises."""
        self._queue.check_serving()
        self._policy(request.policy)
        if self._window is not None and len(request.prompt) >= self._window:
            raise PromptTooLongError(len(request.prompt), self._window)
        return await self._queue.submit(request)

    async def load_weights(self, policy: str, version: int, source: WeightSource) -> int:
        """Nothing to copy: the policy is served under the new version."""
        self._queue.check_serving()
        self._policy(policy)
        self._versions[policy] = version
        return version

    async def close(self) -> None:
        await self._queue.close()

    def _policy(self, name: str) -> ScriptedPolicy:
        if name not in self._policies:
            raise EngineError(f"no policy {name!r} in the engine", f"use one of {sorted(self._policies)}")
        return self._policies[name]

    async def _serve(self, flush: list[Pending[Request]]) -> None:
        answers: list[tuple[Pending[Request], Completion]] = []
        for pending in sorted(flush, key=lambda p: p.item.key):
            self.requests.append(pending.item)
            try:
                answers.append((pending, self._complete(pending.item)))
            except EngineError:
                raise
            except Exception as error:  # noqa: BLE001 - a script's fault belongs to the one who asked
                pending.refuse(error)
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        for pending, completion in answers:
            pending.answer(completion)

    def _complete(self, request: Request) -> Completion:
        policy, sampling = self._policy(request.policy), request.sampling
        reply = self._reply(request, prompt_text(policy.tokenizer, request.prompt))
        limit = sampling.max_tokens
        if self._window is not None:
            limit = min(limit, self._window - len(request.prompt))
        encoded = policy.tokenizer.encode(reply, add_special_tokens=False).ids if isinstance(reply, str) else reply
        ids, stopped = self._cut(policy, request, [*encoded], limit)
        counts = self._num_allowed(policy, request, ids)
        return Completion(
            ids=tuple(ids),
            logprobs=tuple(self._token_logprob(count) for count in counts),
            constrained=tuple(count < policy.vocab_size for count in counts),
            forced=tuple(count == 1 for count in counts),
            finish_reason="stop" if stopped else "length",
            policy_version=self._versions[request.policy],
        )

    def _cut(self, policy: ScriptedPolicy, request: Request, ids: list[int], limit: int) -> tuple[list[int], bool]:
        """End the reply at its first stop, or with the end token, or at `limit` tokens."""
        sampling = request.sampling
        ends = {*policy.eos_ids, *sampling.stop_token_ids}
        for count, token in enumerate(ids[:limit], start=1):
            if token in ends:
                return ids[:count], True
            if sampling.stop:
                text = policy.tokenizer.decode(ids[:count], skip_special_tokens=False)
                if any(stop in text for stop in sampling.stop):
                    return ids[:count], True
        if len(ids) < limit:
            return [*ids, policy.eos_ids[0]], True
        return ids[:limit], False

    def _num_allowed(self, policy: ScriptedPolicy, request: Request, ids: Sequence[int]) -> list[int]:
        if request.sampling.grammar is None:
            return [policy.vocab_size] * len(ids)
        matcher = policy.grammar.matcher(request.sampling.grammar)
        counts = []
        try:
            for token in ids:
                counts.append(matcher.num_allowed)
                matcher.advance(token)
        except GrammarViolationError as error:
            raise EngineError(
                f"the scripted reply to {request.key} breaks its grammar: {error}", "correct the script"
            ) from error
        return counts

    def _token_logprob(self, num_allowed: int) -> float:
        if num_allowed == 1:
            return 0.0
        return -math.log(num_allowed) if self._logprob is None else self._logprob


def prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    """The prompt as text, special tokens included; embeddings show as `<embeddings:LENGTH>`."""
    return "".join(
        f"<embeddings:{segment.length}>"
        if isinstance(segment, Embeddings)
        else tokenizer.decode(list(segment), skip_special_tokens=False)
        for segment in prompt.segments
    )


def resolve_script(name: str) -> Reply:
    """The function that `engine.script` names as `module:function`. Raises `ConfigError` when there is none."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"engine.script: {name!r} is not of the form module:function", "name it so")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"engine.script: cannot import {module_name!r}: {error}", "check the module's name"
        ) from error
    reply: Reply | None = module.__dict__.get(attribute)
    if not callable(reply):
        raise ConfigError(f"engine.script: {module_name!r} has no function {attribute!r}", "check the function's name")
    return reply
