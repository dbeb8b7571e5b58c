"""The recursion: one loop for use and for training, over a batch of questions.

How an agent thinks (`think`: with or without a cache kept between rounds, with or without gradients) and how its states
cross an edge (`send`: links, per-round copies for gradient norms, controls that alter a block) are handed in.

Shapes: B questions, m latent steps, D hidden size of the sender, E of the receiver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agentrl.chat.context import Chat
from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.graph import Edge, Graph
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.rollout.latent import Rollout, fill_slots, latent_rollout
from agentrl.rollout.latent_backbone import Backbone
from agentrl.rollout.latent_cache import PromptMemory
from agentrl.types import LatentAction, Prompt, Task
from agentrl.update.links import transfer


@dataclass(frozen=True, slots=True)
class Agent:
    """A frozen model in a role, and its inner link. Several agents may share one backbone."""

    name: str
    backbone: Backbone
    inner: nn.Module
    chat: Chat


@dataclass(frozen=True, slots=True)
class System:
    """All agents and the outer link of every edge."""

    graph: Graph
    agents: Mapping[str, Agent]
    outer: Mapping[Edge, nn.Module]


@dataclass(frozen=True, slots=True)
class Stage:
    """One agent's rollouts in one round: an accounting value per question, and what they reused of the round before.

    `sent_norm` is the mean length of the vectors that left by each edge, by the edge's name, over all questions, and
    `sent_norms` that of each question. `seconds` is the wall time of all of them, prompts and links included.
    """

    round: int
    agent: str
    actions: tuple[LatentAction, ...]
    prompt_positions: tuple[int, ...]
    reused: tuple[int, ...]
    sent_norm: Mapping[str, float]
    sent_norms: Mapping[str, tuple[float, ...]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Recursion:
    """The decoder's prompts after all rounds, which took `asking_s` seconds, and what was thought on the way."""

    prompts: tuple[Prompt, ...]
    stages: tuple[Stage, ...]
    asking_s: float


Think = Callable[[Agent, Sequence[Prompt]], Rollout]
Send = Callable[[Edge, int, Tensor], Tensor]


def run_rounds(system: System, config: RecursiveConfig, tasks: Sequence[Task], think: Think, send: Send) -> Recursion:
    """All rounds for a batch of questions (see `graph` for the flow on one page).

    `think` maps an agent's prompts to its raw states (B, m, D); `send` maps states and round over an edge to the
    receiver's input embeddings (B, m, E). Raises what they raise, naming nothing of its own.
    """
    graph, rounds = system.graph, config.rounds
    blocks: dict[Edge, Tensor] = {}
    stages = []
    for round_number in range(1, rounds + 1):
        for name in graph.working(round_number, rounds):
            start = time.perf_counter()
            agent = system.agents[name]
            prompts = prompts_of(system, config, name, round_number, tasks, blocks)
            rollout = think(agent, prompts)
            mean: dict[str, float] = {}
            each: dict[str, tuple[float, ...]] = {}
            for edge in graph.outgoing(name, round_number, rounds):
                blocks[edge] = send(edge, round_number, rollout.states_BmD)
                mean[edge.name], each[edge.name] = _norms(blocks[edge])
            actions, seconds = rollout.actions(name), time.perf_counter() - start
            read, reused = rollout.prompt_positions, rollout.reused
            stages.append(Stage(round_number, name, actions, read, reused, mean, each, seconds))
    start = time.perf_counter()
    prompts = prompts_of(system, config, graph.decoder, rounds, tasks, blocks)
    return Recursion(prompts, tuple(stages), time.perf_counter() - start)


def prompts_of(
    system: System,
    config: RecursiveConfig,
    name: str,
    round_number: int,
    tasks: Sequence[Task],
    blocks: Mapping[Edge, Tensor],
) -> tuple[Prompt, ...]:
    """What an agent reads in a round, one prompt per question: its text with the incoming blocks in their slots."""
    text = config.prompt_of(name, round_number)
    by_source = {e.source: blocks[e] for e in system.graph.incoming(name, round_number)}
    order = config.slots_of(name, round_number)
    prompts = []
    for row, task in enumerate(tasks):
        runs = ids_around_slots(system.agents[name].chat, config.system_of(name), text, task, config.instruction)
        prompts.append(fill_slots(runs, [by_source[source][row] for source in order]))
    return tuple(prompts)


def too_long(system: System, config: RecursiveConfig, task: Task, limit: int | None = None) -> str | None:
    """Which agent's window a question exceeds, with the sizes; None where it fits all rounds. `limit`: of all windows
    (`engine.max_model_len`)."""
    steps = config.latent_steps
    for name, agent in system.agents.items():
        window = min(agent.backbone.window, limit or agent.backbone.window)
        for round_number in range(1, min(config.rounds, 2) + 1):
            runs = ids_around_slots(
                agent.chat,
                config.system_of(name),
                config.prompt_of(name, round_number),
                task,
                config.instruction,
            )
            length = sum(map(len, runs)) + (len(runs) - 1) * steps
            needed = length + max(steps - 1, 1 if name == system.graph.decoder else 0)
            if needed > window:
                return (
                    f"agent {name}'s prompt of {length} positions needs {needed} in round {round_number}, "
                    f"the window of {agent.backbone.name} is {window}"
                )
    return None


def thinker(steps: int) -> Think:
    """Rollouts without gradients; what an agent reads in every round is computed once. For one batch of questions."""
    memories: dict[str, PromptMemory] = {}

    def think(agent: Agent, prompts: Sequence[Prompt]) -> Rollout:
        memory = memories.setdefault(agent.name, PromptMemory())
        return latent_rollout(agent.backbone, prompts, agent.inner, steps, memory=memory)

    return think


def sender(system: System) -> Send:
    """Over an edge by its links: R_out(R_in(H)), without gradients."""

    @torch.no_grad()
    def send(edge: Edge, _round: int, states_BmD: Tensor) -> Tensor:
        receiver = system.agents[edge.target].backbone
        return transfer(states_BmD, system.agents[edge.source].inner, system.outer[edge]).to(receiver.dtype)

    return send


def _norms(block_BmE: Tensor) -> tuple[float, tuple[float, ...]]:
    """The mean length of all vectors, and of each question's."""
    if not block_BmE.numel():
        return 0.0, (0.0,) * len(block_BmE)
    norms_Bm = block_BmE.detach().float().norm(dim=-1)
    return norms_Bm.mean().item(), tuple(norms_Bm.mean(dim=-1).tolist())
