"""Who acts when: a chain, a graph with fan-out and fan-in, stretches that repeat; from what each agent waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


class TeamError(ValueError):
    """The declaration is no team; the message names the key."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Agents that may act at once: everything they wait for has acted."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Stages `first` to `last` (inclusive) repeat at most `max_rounds` times in all, until the last agent of stage
    `last` says `until`."""

    first: int
    last: int
    max_rounds: int
    until: str | None


@dataclass(frozen=True, slots=True)
class Team:
    """`after`: agent -> those it waits for. Loops never overlap."""

    stages: tuple[Stage, ...]
    after: Mapping[str, tuple[str, ...]]
    loops: tuple[Loop, ...]

    def before(self) -> dict[str, frozenset[str]]:
        """Agent -> every agent whose work may lie before it: all of earlier stages, and all of its own loop."""
        out: dict[str, frozenset[str]] = {}
        earlier: set[str] = set()
        for place, stage in enumerate(self.stages):
            looped = {
                name
                for loop in self.loops
                if loop.first <= place <= loop.last and loop.max_rounds > 1
                for inner in self.stages[loop.first : loop.last + 1]
                for name in inner.agents
            }
            for name in stage.agents:
                out[name] = frozenset(earlier | looped)
            earlier |= set(stage.agents)
        return out

    def loop_at(self, stage: int) -> Loop | None:
        """The loop that begins with a stage."""
        return next((loop for loop in self.loops if loop.first == stage), None)


def plan_team(
    after: Mapping[str, Sequence[str] | None],
    loops: Sequence[tuple[Sequence[str], int, str | None]] = (),
) -> Team:
    """Stages of a team. `after[agent]` None means the agent before it in the mapping; empty means from the start.

    Raises `TeamError` for no agents, unknown names, a cycle (which only `loops`, with their limit, may make), and loops
    that are no whole stretch of stages or overlap.
    """
    if not after:
        raise TeamError("agents: a team has at least one agent")
    names = list(after)
    waits: dict[str, tuple[str, ...]] = {}
    for place, name in enumerate(names):
        given = after[name]
        waits[name] = tuple(names[place - 1 : place]) if given is None else tuple(given)
        for other in waits[name]:
            if other not in after:
                raise TeamError(f"agents.{name}.after: there is no agent {other!r}; there are {names}")
    stages = _stages(names, waits)
    place_of = {name: i for i, stage in enumerate(stages) for name in stage.agents}
    planned: list[Loop] = []
    for number, (members, max_rounds, until) in enumerate(loops):
        planned.append(_loop(f"loops[{number}]", members, max_rounds, until, stages, place_of))
    planned.sort(key=lambda loop: loop.first)
    for one, two in pairwise(planned):
        if two.first <= one.last:
            raise TeamError("loops: two loops overlap; an agent belongs to one loop at most")
    return Team(stages, waits, tuple(planned))


def _stages(names: Sequence[str], waits: Mapping[str, Sequence[str]]) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    done: set[str] = set()
    while len(done) < len(names):
        ready = tuple(name for name in names if name not in done and set(waits[name]) <= done)
        if not ready:
            stuck = [name for name in names if name not in done]
            raise TeamError(
                f"agents.{stuck[0]}.after: {', '.join(stuck)} wait for each other; a cycle needs a limit: declare it "
                "under loops with max_rounds"
            )
        stages.append(Stage(ready))
        done |= set(ready)
    return tuple(stages)


def _loop(
    key: str,
    members: Sequence[str],
    max_rounds: int,
    until: str | None,
    stages: Sequence[Stage],
    place_of: Mapping[str, int],
) -> Loop:
    for name in members:
        if name not in place_of:
            raise TeamError(f"{key}.agents: there is no agent {name!r}")
    first, last = min(place_of[n] for n in members), max(place_of[n] for n in members)
    inside = {name for stage in stages[first : last + 1] for name in stage.agents}
    if inside != set(members):
        odd = sorted(inside - set(members))[0]
        raise TeamError(f"{key}.agents: {odd!r} acts in that stretch too; a loop repeats whole stages of the order")
    if until is not None and len(stages[last].agents) > 1:
        raise TeamError(f"{key}.until: the loop ends with several agents at once; let one of them come last")
    return Loop(first, last, max_rounds, until)
