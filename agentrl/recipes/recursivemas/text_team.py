"""The text team (Recursive-TextMAS): the same graph, models, prompts and rounds, with written messages in the slots.

It is the control that says what latents are worth, so it computes no more than they do: the same batch, one key-value
cache per agent that keeps what the agent reads in every round, and messages of a length that may be set. The last
answer is decoded as the latent system decodes its own. Messages are text from the world: they write no control token.

Source: the baseline of "Recursive Multi-Agent Systems", arXiv 2604.25917. Deviations, each in the baseline's favour:
no agent's message is capped below the others', and for several answers to a question the messages are written once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.recipes.recursivemas.decode import sampling_of
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import Loaded
from agentrl.rollout.hf import uniforms
from agentrl.rollout.hf_generate import HFPolicy, Row, generate_batch
from agentrl.rollout.hf_head import Float32Head, use_float32_head
from agentrl.rollout.latent_cache import PromptMemory
from agentrl.types import Action, Key, Prompt, Request, Sampling, Task

_THINKING_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class TextStage:
    """One agent's messages in one round, and per question: prompt positions taken from the round before, positions
    computed, and tokens of incoming messages that did not fit the window."""

    round: int
    agent: str
    actions: tuple[Action, ...]
    reused: tuple[int, ...]
    computed: tuple[int, ...]
    cut: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Written:
    """The decoder's prompts after all rounds, which took `asking_s` seconds; what was written on the way; and per
    question the tokens that were cut from the decoder's last messages."""

    prompts: tuple[Prompt, ...]
    stages: tuple[TextStage, ...]
    cut: tuple[int, ...]
    asking_s: float


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt, how many ids it begins with that come again in later rounds, and what was cut from its messages."""

    prompt: Prompt
    lead: int
    cut: int


class TextTeam:
    """Writes messages round the graph. All models are loaded already, as for latents."""

    def __init__(self, recipe: RecursiveRecipe, loaded: Loaded) -> None:
        self._recipe, self._loaded = recipe, loaded
        for name in recipe.recursivemas.graph.agents:
            model = self._policy(name).model
            if not isinstance(model.get_output_embeddings().forward, Float32Head):
                use_float32_head(model)

    def write(self, tasks: Sequence[Task], phase: str) -> Written:
        """All rounds for a batch of questions, up to the decoder's last prompts."""
        config = self._recipe.recursivemas
        graph, rounds = config.graph, config.rounds
        memories: dict[str, PromptMemory] = {}
        messages: dict[Edge, tuple[str, ...]] = {}
        stages = []
        for round_number in range(1, rounds + 1):
            for name in graph.working(round_number, rounds):
                start = time.perf_counter()
                asked = self._asked(name, round_number, tasks, messages)
                memory = memories.setdefault(name, PromptMemory())
                rows, actions = self._say(name, round_number, tasks, asked, phase, memory)
                texts = tuple(_message(action.text) for action in actions)
                messages |= dict.fromkeys(graph.outgoing(name, round_number, rounds), texts)
                stages.append(
                    TextStage(
                        round_number,
                        name,
                        actions,
                        tuple(row.reused for row in rows),
                        tuple(row.computed for row in rows),
                        tuple(one.cut for one in asked),
                        time.perf_counter() - start,
                    )
                )
        start = time.perf_counter()
        asked = self._asked(graph.decoder, rounds, tasks, messages)
        prompts, cut = tuple(one.prompt for one in asked), tuple(one.cut for one in asked)
        return Written(prompts, tuple(stages), cut, time.perf_counter() - start)

    def _policy(self, agent: str) -> HFPolicy:
        return self._loaded.policies[self._recipe.agents[agent].policy]

    def _window(self, agent: str) -> int:
        own = self._loaded.system.agents[agent].backbone.window
        return min(own, self._recipe.engine.max_model_len or own)

    def _sampling(self, agent: str) -> Sampling:
        """The agent's own, with the length of a message."""
        own = self._recipe.agents[agent].sampling
        limit = self._recipe.recursivemas.text_team.max_tokens
        return sampling_of(own if limit is None else own.model_copy(update={"max_tokens": limit}))

    def _say(
        self,
        name: str,
        round_number: int,
        tasks: Sequence[Task],
        asked: Sequence[_Asked],
        phase: str,
        memory: PromptMemory,
    ) -> tuple[list[Row], tuple[Action, ...]]:
        agent, policy, sampling = self._loaded.system.agents[name], self._policy(name), self._sampling(name)
        exact = self._recipe.recursivemas.text_team.exact
        place = self._recipe.recursivemas.graph.agents.index(name)
        rows = []
        for task, one in zip(tasks, asked, strict=True):
            key = Key(phase, 0, task.id, 0, round_number, place)
            request = Request(self._recipe.agents[name].policy, one.prompt, sampling, key)
            room = min(sampling.max_tokens, self._window(name) - len(one.prompt))
            rows.append(
                Row(
                    request,
                    room,
                    uniforms(self._recipe.run.seed, key, room),
                    frozenset(policy.eos_ids),
                    min_tokens=room if exact else 0,
                    lead=one.lead,
                )
            )
        done = generate_batch(policy, rows, 0, share_limit=0, memory=memory)
        texts = [agent.chat.format.decode_completion(completion.ids) for completion in done]
        actions = (Action(name, row.request, c, text) for row, c, text in zip(rows, done, texts, strict=True))
        return rows, tuple(actions)

    def _asked(
        self, name: str, round_number: int, tasks: Sequence[Task], messages: Mapping[Edge, tuple[str, ...]]
    ) -> list[_Asked]:
        """What an agent reads in a round: the latent system's prompts with texts in their slots."""
        config, agent = self._recipe.recursivemas, self._loaded.system.agents[name]
        by_source = {e.source: messages[e] for e in config.graph.incoming(name, round_number)}
        text, order = config.prompt_of(name, round_number), config.slots_of(name, round_number)
        limit = self._sampling(name).max_tokens
        out = []
        for row, task in enumerate(tasks):
            runs = ids_around_slots(agent.chat, config.system_of(name), text, task, config.instruction)
            room = self._window(name) - sum(map(len, runs))
            # Half of what the messages leave free is the agent's own, unless it needs less.
            share = max(room - min(limit, room // 2), 0) // max(len(order), 1)
            ids, cut = list(runs[0]), 0
            for source, run in zip(order, runs[1:], strict=True):
                said = agent.chat.format.encode_world(by_source[source][row])
                cut += max(len(said) - share, 0)
                ids += [*said[:share], *run]
            out.append(_Asked(Prompt.of(ids), len(runs[0]), cut))
        return out


def _message(text: str) -> str:
    """What is passed on: an agent's thinking is its own."""
    return text.rpartition(_THINKING_ENDS)[2].strip()
