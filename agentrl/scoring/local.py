"""An engine in this process as a scoring backend: a local model as judge or coach, its reply under a JSON grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.chat.context import Chat
from agentrl.config.schema import ScorerConfig
from agentrl.errors import ConfigError
from agentrl.protocols import Engine
from agentrl.rollout.faults import PromptTooLongError
from agentrl.scoring.client import Call, CallError, request_key
from agentrl.scoring.record import Reply
from agentrl.types import Grammar, Key, Prompt, Request, Sampling

_FORM_TOKENS = 48  # braces, keys and numbers of a reply


class EngineBackend:
    """Chat completions of one policy of an engine, decoded under the reply's JSON schema.

    A scorer is no live coroutine of a rollout, so give its engine a gate of its own. The engine stays its owner's to
    close. The request's key is a hash of the conversation: what is sampled does not depend on the order of calls.
    """

    def __init__(self, config: ScorerConfig, engine: Engine, policy: str, chat: Chat) -> None:
        self._config = config
        self._engine = engine
        self._policy = policy
        self._chat = chat

    async def complete(self, call: Call) -> Reply:
        """One completion. Raises `CallError` when the conversation does not fit, and `EngineError` as the engine."""
        try:
            ids = self._chat.start(call.messages)
        except ConfigError as error:
            raise CallError(error.cause, retry=False) from error
        sampling = Sampling(
            temperature=self._config.temperature or 0.0,
            max_tokens=self._config.max_tokens,
            grammar=Grammar("json_schema", json.dumps(bounded(json.loads(call.schema), self._config.max_tokens))),
        )
        digest = request_key({"ids": list(ids)})
        key = Key(phase="score", step=0, task=digest, g=call.repeat, turn=0, agent=0)
        try:
            done = await self._engine.generate(Request(self._policy, Prompt.of(ids), sampling, key))
        except PromptTooLongError as error:
            raise CallError(f"the case does not fit: {error}", retry=False) from error
        text = self._chat.format.decode_completion(done.ids)
        return Reply(text, len(ids), len(done.ids), done.finish_reason)

    async def close(self) -> None:
        """Nothing: the engine belongs to whoever made it."""


def bounded(schema: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The schema with a length limit on its free strings, so that a reply that rambles still ends in form."""
    properties = {name: dict(value) for name, value in schema.get("properties", {}).items()}
    free = [v for v in properties.values() if v.get("type") == "string" and "enum" not in v and "maxLength" not in v]
    for value in free:
        # Half of the tokens, at a token a character: most characters need less than one.
        value["maxLength"] = max(1, (max_tokens - _FORM_TOKENS) // (2 * len(free)))
    return {**schema, "properties": properties}
