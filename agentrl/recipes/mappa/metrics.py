"""A MAPPA step in numbers: the shared ones, then each agent's behaviour (M-31), then the method's own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.recipes.collect import asking_costs, total_counts
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.credit import Credit
from agentrl.types import CreditedSample, MaskReason, Score, ScoredTrajectory, Turn
from agentrl.update.step import UpdateResult, has_effect

Value = float | None
_SUMS = ("tokens/trained", "tokens/computed", "mismatch/tokens", "samples/moving", "samples/idle", "steps/skipped")
_FIRST = ("kl/mismatch", "mismatch/mean_abs", "mismatch/max", "mismatch/tokens")
_GIVEN = (MaskReason.PROMPT, MaskReason.WORLD)


def mappa_metrics(
    recipe: MappaRecipe,
    scored: Sequence[ScoredTrajectory],
    credit: Credit,
    results: Mapping[str, Sequence[UpdateResult]],
) -> dict[str, Value]:
    """One flat mapping. Names that all methods share are over all policies; `/<policy>` follows those of one.

    `tokens/trained`, `tokens/no_advantage` (inside the mask, in samples that could not move the weights) and
    `tokens/masked/<reason>` add up to `tokens/generated`.
    """
    by_policy = {name: over_batches(updates) for name, updates in results.items() if updates}
    out = _shared(list(by_policy.values()))
    if len(by_policy) > 1:
        out |= {f"{key}/{name}": v for name, m in by_policy.items() for key, v in m.items() if "/" not in key}
    out |= dict(credit.metrics)
    counts = total_counts(scored)
    out |= {
        "groups/zero_variance": credit.metrics.get("mappa/degenerate_groups", 0.0),
        "kl/ref": credit.metrics.get("mappa/kl_to_reference"),
        "mappa/tool_calls": counts["tool_calls"],
        "mappa/tool_errors": counts["tool_errors"],
        "mappa/malformed_calls": counts["malformed_calls"],
        "mappa/failure_rate": _share(sum(s.trajectory.status == "failed" for s in scored), len(scored)),
        "mappa/updates": sum(u.stats is not None for updates in results.values() for u in updates),
    }
    for agent in recipe.agents:
        kls = [kl for one in credit.credited if one.sample.agent == agent for kl in _kls(one)]
        out[f"mappa/{agent}/kl"] = statistics.fmean(kls) if kls else None
        clipped = [m[key] for m in by_policy.values() if (key := f"clip_fraction/{agent}") in m]
        out[f"mappa/{agent}/clip_fraction"] = clipped[0] if clipped else 0.0
        norms = [m[key] for m in by_policy.values() if (key := f"grad_norm/{agent}") in m]
        out |= {f"mappa/{agent}/grad_norm": norms[0]} if norms else {}
    out |= {
        f"tokens/masked/{reason}": sum(r is reason for one in credit.credited for r in one.sample.reasons)
        for reason in MaskReason
        if reason not in _GIVEN
    }
    idle = [one.sample for one in credit.credited if not has_effect(one, recipe.algorithm.kl_coef)]
    out["tokens/no_advantage"] = sum(sample.num_trained for sample in idle)
    return out | coach_metrics(recipe, scored)


def coach_metrics(recipe: MappaRecipe, scored: Sequence[ScoredTrajectory]) -> dict[str, Value]:
    """The actions' scores and behaviour: over all, as rewards on the scale of the reward, and per agent from 0 to 10.

    The outcome, where the recipe has one, is reported beside them and is not the reward.
    """
    out: dict[str, Value] = {}
    pairs = [pair for one in scored for pair in zip(one.trajectory.turns, one.action_scores, strict=True)]
    asked = any(score is not None for _, score in pairs)
    if asked:
        rewards = [score.value / 10 for _, score in pairs if score is not None and score.value is not None]
        out["reward/mean"], out["reward/std"] = _moments(rewards)
        out["reward/missing"] = len(pairs) - len(rewards)
        out |= asking_costs("coach", (score.info for _, score in pairs if score is not None))
    if recipe.reward is not None:
        outcomes = [one.outcome.value for one in scored if one.outcome.value is not None]
        out["outcome/mean"], _ = _moments(outcomes)
        out["outcome/missing"] = len(scored) - len(outcomes)
    for agent in recipe.agents:
        out |= _behaviour(agent, [(turn, score) for turn, score in pairs if turn.action.agent == agent], asked)
    return out


def _behaviour(agent: str, pairs: Sequence[tuple[Turn, Score | None]], asked: bool) -> dict[str, Value]:
    head, turns = f"mappa/{agent}", [turn for turn, _ in pairs]
    scores = [score.value for _, score in pairs if score is not None and score.value is not None]
    lengths = [len(turn.action.completion.ids) for turn in turns]
    out: dict[str, Value] = {
        f"{head}/actions": len(turns),
        f"{head}/tool_rate": _share(
            sum(t.observation is not None and bool(t.observation.tool) for t in turns), len(turns)
        ),
        f"{head}/response_tokens": statistics.fmean(lengths) if lengths else None,
        f"{head}/truncated": _share(sum(t.action.completion.finish_reason == "length" for t in turns), len(turns)),
    }
    if asked:
        mean, std = _moments(scores)
        out |= {f"{head}/coach_mean": mean, f"{head}/coach_std": std, f"{head}/coach_missing": len(turns) - len(scores)}
    return out


def over_batches(updates: Sequence[UpdateResult]) -> dict[str, Value]:
    """The metrics of a policy's optimiser steps as one: counts summed, means taken over those that have a value.

    Engine and trainer hold the same weights before the first step only, so their gap is that one's.
    """
    out: dict[str, Value] = dict(updates[0].metrics)
    for key in dict.fromkeys(key for update in updates for key in update.metrics):
        values = [v for update in updates if (v := update.metrics.get(key)) is not None]
        if key in _FIRST:
            continue
        out[key] = sum(values) if key in _SUMS else statistics.fmean(values) if values else None
    return out


def untrained_reason(credit: Credit) -> str | None:
    """Why a step trains no token, as one line of counts; None when it trains some."""
    if any(a != 0 and w != 0 for one in credit.credited for a, w in zip(one.advantages, one.weights, strict=True)):
        return None
    if not credit.credited:
        return "there are no samples"
    table = {
        str(reason): n
        for reason in MaskReason
        if reason not in _GIVEN and (n := sum(r is reason for c in credit.credited for r in c.sample.reasons))
    }
    open_tokens = sum(one.sample.num_trained for one in credit.credited)
    table |= {"no advantage": open_tokens} if open_tokens else {}
    return "tokens: " + ", ".join(f"{reason} {count}" for reason, count in table.items())


def _shared(found: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The numbers of several policies as one: counts summed, the rest averaged. Those of one part stay out."""
    out: dict[str, Value] = {}
    for key in dict.fromkeys(key for m in found for key in m):
        values = [v for m in found if (v := m.get(key)) is not None]
        per_part = key.rpartition("/")[0] in ("loss", "clip_fraction", "grad_norm")
        if not per_part:
            out[key] = sum(values) if key in _SUMS else statistics.fmean(values) if values else None
    return out


def _kls(one: CreditedSample) -> list[float]:
    """log pi_old - log pi_ref at the trained tokens of a sample that has both."""
    old, reference = one.scored.old, one.scored.reference
    if old is None or reference is None:
        return []
    return [o - r for o, r, trained in zip(old, reference, one.sample.loss_mask, strict=True) if trained]


def _moments(values: Sequence[Any]) -> tuple[Value, Value]:
    return (statistics.fmean(values), statistics.pstdev(values)) if values else (None, None)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
