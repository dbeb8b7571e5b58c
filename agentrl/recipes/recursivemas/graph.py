"""Who thinks when: a directed graph of agents, walked once per recursion round.

Forward edges carry a block within the round, feedback edges into the next one. One agent decodes text, in the last
round only; there it does no rollout, and nobody works whom it does not hear.

    run(question):
        blocks = {}                                              # edge -> latents, of this round or the last
        for r in 1..rounds:
            for agent in graph.working(r, rounds):               # forward edges decide the order
                prompt = agent's text of round r, incoming blocks in its slots
                states = m latent steps of the agent's frozen model on prompt
                for edge in graph.outgoing(agent, r, rounds):
                    blocks[edge] = outer link(inner link(states))
        answer = text that the decoder samples from its prompt   # the only text

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, and its released code. A sequential ring of three does 3n - 1
rollouts in n rounds, a mixture of three experts 4n - 1, a pair 2n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """From one agent to another. `key` is the edge's name in the official link files, where it has one."""

    source: str
    target: str
    feedback: bool = False
    key: str | None = None

    @property
    def name(self) -> str:
        return f"{self.source}-{self.target}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Agents in the order of the config, edges, and the agent that decodes."""

    agents: tuple[str, ...]
    edges: tuple[Edge, ...]
    decoder: str

    def problem(self) -> str | None:
        """Why this is no recursion, in one line; None where it is one."""
        names = set(self.agents)
        for name in self.agents:
            if not name.isidentifier():
                return f"agent {name!r}: a name is letters, digits and underscores"
        if self.decoder not in names:
            return f"decoder {self.decoder!r} is not among the agents {sorted(names)}"
        seen: set[tuple[str, str]] = set()
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in names:
                    return f"edge {edge.name}: there is no agent {end!r}, only {sorted(names)}"
            if edge.source == edge.target:
                return f"edge {edge.name}: an agent keeps its own states, it needs no edge to itself"
            if (edge.source, edge.target) in seen:
                return f"edge {edge.name} stands there twice"
            seen.add((edge.source, edge.target))
        if len(self._sorted()) < len(self.agents):
            stuck = sorted(names - set(self._sorted()))
            return f"the forward edges among {', '.join(stuck)} form a circle; mark the closing edge feedback: true"
        silent = [a for a in self.agents if a not in self._heard(by=self.decoder, feedback=True)]
        if silent:
            return f"nothing leads from agent {silent[0]!r} to the decoder {self.decoder!r}"
        return None

    def working(self, round_number: int, rounds: int) -> tuple[str, ...]:
        """Who does a rollout in round `round_number` (from 1), in order: all, but in the last round only those whom
        the decoder hears in that round, and not the decoder."""
        if round_number < rounds:
            return self._sorted()
        heard = self._heard(by=self.decoder, feedback=False) - {self.decoder}
        return tuple(a for a in self._sorted() if a in heard)

    def incoming(self, agent: str, round_number: int) -> tuple[Edge, ...]:
        """Edges whose block the agent hears in this round: no feedback in the first."""
        return tuple(e for e in self.edges if e.target == agent and not (e.feedback and round_number == 1))

    def outgoing(self, agent: str, round_number: int, rounds: int) -> tuple[Edge, ...]:
        """Edges that the agent's states leave by: no feedback in the last round, and none to whom nobody listens."""
        last = round_number == rounds
        heard = self._heard(by=self.decoder, feedback=False) if last else set(self.agents)
        return tuple(
            e for e in self.edges if e.source == agent and not (last and (e.feedback or e.target not in heard))
        )

    def rollouts(self, rounds: int) -> int:
        """Latent rollouts per question."""
        return sum(len(self.working(r, rounds)) for r in range(1, rounds + 1))

    def used(self, rounds: int) -> tuple[tuple[str, ...], tuple[Edge, ...]]:
        """The agents that think in some round and the edges that carry a block: whose links an answer depends on. One
        round has no use for feedback, nor for the decoder's inner link."""
        working = {number: self.working(number, rounds) for number in range(1, rounds + 1)}
        agents = {agent for names in working.values() for agent in names}
        edges = {e for n, names in working.items() for a in names for e in self.outgoing(a, n, rounds)}
        return tuple(a for a in self.agents if a in agents), tuple(e for e in self.edges if e in edges)

    def _sorted(self) -> tuple[str, ...]:
        """Agents after everyone whom they hear within a round, else in the config's order."""
        done: list[str] = []
        while True:
            ready = [a for a in self.agents if a not in done and self._sources(a) <= set(done)]
            if not ready:
                return tuple(done)
            done.append(ready[0])

    def _sources(self, agent: str) -> set[str]:
        return {e.source for e in self.edges if e.target == agent and not e.feedback}

    def _heard(self, by: str, feedback: bool) -> set[str]:
        """Everyone from whom a path leads to `by`, itself included."""
        heard = {by}
        while True:
            more = {e.source for e in self.edges if e.target in heard and (feedback or not e.feedback)} - heard
            if not more:
                return heard
            heard |= more


def ring(agents: Sequence[str], keys: Sequence[str | None] = ()) -> Graph:
    """Agents in a row; the last one decodes and feeds back to the first."""
    last = len(agents) - 1
    named = [*keys, *[None] * (len(agents) - len(keys))]
    edges = [Edge(a, agents[(i + 1) % len(agents)], i == last, named[i]) for i, a in enumerate(agents)]
    return Graph(tuple(agents), tuple(edges), agents[-1])
