"""Trajectories -> samples: one per stretch of tokens that an agent saw as one context.

Each action's prompt is what the agent saw, and contexts grow append-only, so the actions of a conversation chain: the
next prompt begins with the previous prompt and its completion, and what follows is the world's. Chains are read off
the ids themselves. Where a context was re-rendered the chain breaks; each piece then has weight 1/pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.types import MaskReason, Sample, ScoredTrajectory, Span, Turn

PartOf = Callable[[str], str]
FateOf = Callable[[str], MaskReason | None]


@dataclass(frozen=True, slots=True)
class Chain:
    """Indices of turns whose contexts are beginnings of one another, in order."""

    agent: str
    turn_indices: tuple[int, ...]


def chains(turns: Sequence[Turn]) -> list[Chain]:
    """Group an agent's turns into contexts. A turn joins the chain whose last context it continues, the longest where
    several fit, else it starts one."""
    open_chains: list[list[int]] = []
    contexts: list[tuple[int, ...]] = []
    for index, turn in enumerate(turns):
        action = turn.action
        prompt = action.request.prompt.ids
        fitting = [
            place
            for place, (chain, context) in enumerate(zip(open_chains, contexts, strict=True))
            if turns[chain[-1]].action.agent == action.agent and prompt[: len(context)] == context
        ]
        if fitting:
            place = max(fitting, key=lambda i: len(contexts[i]))
        else:
            place = len(open_chains)
            open_chains.append([])
            contexts.append(())
        open_chains[place].append(index)
        contexts[place] = prompt + action.completion.ids
    return [Chain(turns[c[0]].action.agent, tuple(c)) for c in open_chains]


def to_samples(
    scored: ScoredTrajectory,
    *,
    part_of: PartOf,
    fate_of: FateOf,
    constrained: str,
    conversations: bool = True,
) -> list[Sample]:
    """All samples of a trajectory, in the order of their first turns.

    `part_of(agent)` labels the part. `fate_of(agent)` masks every token of an agent (FROZEN) or none. `constrained`
    is `algorithm.constrained`. Tokens of a missing score are masked REWARD_MISSING, those of a failed rollout FAILED.
    With `conversations` the pieces of one agent's broken chain share weight 1; without, each is a sample of its own.
    """
    trajectory = scored.trajectory
    found = chains(trajectory.turns)
    roots: dict[str, int] = {}
    for chain in found:
        if trajectory.turns[chain.turn_indices[0]].parent is None:
            roots[chain.agent] = roots.get(chain.agent, 0) + 1
    samples = []
    for place, chain in enumerate(found):
        first = trajectory.turns[chain.turn_indices[0]]
        pieces = roots[chain.agent] if conversations and first.parent is None else 1
        samples.append(_sample(scored, chain, place, 1.0 / pieces, part_of, fate_of, constrained))
    return samples


def _sample(
    scored: ScoredTrajectory,
    chain: Chain,
    place: int,
    weight: float,
    part_of: PartOf,
    fate_of: FateOf,
    constrained: str,
) -> Sample:
    trajectory = scored.trajectory
    ids: list[int] = []
    reasons: list[MaskReason | None] = []
    behaviour: list[float] = []
    under_grammar: list[bool] = []
    spans: list[Span] = []
    whole_fate = _fate(scored, fate_of(chain.agent))
    for index in chain.turn_indices:
        action = trajectory.turns[index].action
        prompt, completion, sampling = action.request.prompt.ids, action.completion, action.request.sampling
        given = prompt[len(ids) :]
        reasons += [MaskReason.WORLD if ids else MaskReason.PROMPT] * len(given)
        behaviour += [0.0] * len(given)
        under_grammar += [False] * len(given)
        ids += given
        start = len(ids)
        ids += completion.ids
        behaviour += completion.logprobs
        under_grammar += completion.constrained
        for cut, forced in zip(completion.constrained, completion.forced, strict=True):
            reasons.append(_reason(whole_fate, cut, forced, constrained))
        spans.append(Span(start, len(ids), index, sampling.temperature, sampling.grammar))
    first = trajectory.turns[chain.turn_indices[0]].action
    versions = {trajectory.turns[i].action.completion.policy_version for i in chain.turn_indices}
    assert len(versions) == 1, f"{trajectory.id}: one context was sampled under policy versions {sorted(versions)}"
    return Sample(
        id=f"{trajectory.id}/{place}",
        trajectory_id=trajectory.id,
        group=trajectory.task.id,
        agent=chain.agent,
        part=part_of(chain.agent),
        policy=first.request.policy,
        policy_version=versions.pop(),
        ids=tuple(ids),
        reasons=tuple(reasons),
        behaviour=tuple(behaviour),
        constrained=tuple(under_grammar),
        spans=tuple(spans),
        score=scored.outcome,
        weight=weight,
    )


def _fate(scored: ScoredTrajectory, agent_fate: MaskReason | None) -> MaskReason | None:
    if agent_fate is not None:
        return agent_fate
    if scored.trajectory.status == "failed":
        return MaskReason.FAILED
    return MaskReason.REWARD_MISSING if scored.outcome.missing else None


def _reason(fate: MaskReason | None, under_grammar: bool, forced: bool, constrained: str) -> MaskReason | None:
    if fate is not None:
        return fate
    if forced:
        return MaskReason.FORCED
    return MaskReason.CONSTRAINED if under_grammar and constrained == "mask" else None
