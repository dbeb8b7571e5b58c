"""One agent as it speaks: its settings, its chat, and how it samples in this phase."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.chat.context import Chat
from agentrl.config.schema import AgentConfig
from agentrl.types import Action, Grammar, Sampling


@dataclass(frozen=True, slots=True)
class Voice:
    """`index` is the agent's place in the config; `temperature` is the phase's, which may not be the agent's own."""

    name: str
    index: int
    config: AgentConfig
    chat: Chat
    temperature: float

    def sampling(self, max_tokens: int, grammar: Grammar | None = None, stop: tuple[str, ...] = ()) -> Sampling:
        given = self.config.sampling
        return Sampling(
            temperature=self.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            max_tokens=min(given.max_tokens, max_tokens),
            stop=stop,
            stop_token_ids=self.chat.format.eos_ids,
            grammar=grammar,
        )

    def text(self, ids: Sequence[int]) -> str:
        return self.chat.format.decode_completion(ids)

    def said(self, action: Action) -> str:
        """The action's text from the opening of its thinking on, which may stand in the generation prompt."""
        opened = re.search(r"<think>\s*$", self.chat.format.decode(action.request.prompt.ids[-16:]))
        return f"<think>{action.text}" if opened else action.text
