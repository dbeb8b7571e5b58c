"""Who earned what in MAPPA: REINFORCE++ on per-action rewards (section 3.1), and the baselines beside it.

Per action with trained tokens 1..L, reward rho, and k_l = log pi_old - log pi_ref at its token l:

    r_l = -beta k_l + [l = L] rho,   G_l = sum_{m >= l} r_m,   A_l = (G_l - mu) / sqrt(max(var, 1e-8))

mu and var are the mean and population variance of G over all trained tokens of one normalisation group (a policy, or
an agent), over all ranks, taken once. Groups of prompts do not exist here (M-14). Where the rewards of a group vary by
less than 1e-6, nothing is whitened and the raw KL returns pull to the reference (M-13).

Deviations from the published code: one normalisation, not two; truncated and missing actions are in no statistic;
k is held within +-20. Shape suffix: _T token positions of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.advantage import (
    batch_advantages,
    group_advantages,
    moments,
    returns_to_go,
    scores_are_degenerate,
    token_rewards,
)
from agentrl.algo.kl import k1
from agentrl.algo.ratio import log_ratio
from agentrl.recipes.mappa.config import MappaConfig
from agentrl.types import CreditedSample, MaskReason, Sample, ScoredSample

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks. Called the same number of times on each, whatever a rank holds."""
Rewards = Mapping[str, Sequence[float | None]]
"""Trajectory id -> reward of each of its turns' actions."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Credited samples in the order given, and what the step's metrics report, over all ranks."""

    credited: tuple[CreditedSample, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Returns:
    """Per token of one sample, float64, 0 where not trained; `rewards` of its actions that have a trained token."""

    mask_T: Tensor
    returns_T: Tensor
    kl_returns_T: Tensor
    kl_T: Tensor
    rewards: tuple[float, ...]


def assign(
    scored: Sequence[ScoredSample],
    rewards: Rewards,
    mappa: MappaConfig,
    *,
    groups: Sequence[str],
    policies: Sequence[str],
    all_reduce: Reduce = lambda sums: sums,
) -> Credit:
    """Credit all samples of a step.

    `groups` are the recipe's `normalisation_groups` and `policies` its policies, equal on all ranks. With a KL in the
    reward each sample needs `old` and `reference` log-probabilities (`ValueError` without). The weights make the loss a
    mean within each policy over all ranks: over tokens, or over actions.
    """
    if mappa.credit == "grpo":
        advantages, metrics = _grpo(scored, rewards), dict[str, float]()
    elif mappa.credit == "supervised":
        advantages, metrics = _imitation(scored, rewards), dict[str, float]()
    else:
        advantages, metrics = _reinforce(scored, rewards, mappa, groups, all_reduce)
    weights = token_weights([one.sample for one in scored], mappa, policies, all_reduce)
    credited = [
        CreditedSample(one, tuple(a.tolist()), tuple(w.tolist()))
        for one, a, w in zip(scored, advantages, weights, strict=True)
    ]
    return Credit(tuple(credited), metrics | _counts([one.sample for one in scored], all_reduce))


def group_of(sample: Sample, mappa: MappaConfig) -> str:
    """The normalisation group of a sample."""
    return sample.policy if mappa.normalise_over == "policy" else sample.agent


def _reinforce(
    scored: Sequence[ScoredSample], rewards: Rewards, mappa: MappaConfig, groups: Sequence[str], all_reduce: Reduce
) -> tuple[list[Tensor], dict[str, float]]:
    found = [_returns(one, rewards[one.sample.trajectory_id], mappa.kl_coef) for one in scored]
    advantages = [torch.zeros(len(one.sample.ids), dtype=torch.float64) for one in scored]
    flat, kl_sum, num_tokens = 0, 0.0, 0.0
    for group in groups:
        mine = [i for i, one in enumerate(scored) if group_of(one.sample, mappa) == group]
        actions = torch.tensor([r for i in mine for r in found[i].rewards], dtype=torch.float64)
        sums = torch.stack(
            [
                _sum([moments(found[i].returns_T, found[i].mask_T) for i in mine]),
                moments(actions, torch.ones_like(actions, dtype=torch.bool)),
                _sum([moments(found[i].kl_T, found[i].mask_T) for i in mine]),
            ]
        )
        return_moments_3, reward_moments_3, kl_moments_3 = all_reduce(sums)
        for i in mine:
            out = batch_advantages(
                found[i].returns_T, found[i].kl_returns_T, found[i].mask_T, return_moments_3, reward_moments_3
            )
            advantages[i] = out.values_T
        present = float(reward_moments_3[0]) > 0
        flat += present and scores_are_degenerate(reward_moments_3)
        kl_sum, num_tokens = kl_sum + float(kl_moments_3[1]), num_tokens + float(kl_moments_3[0])
    return advantages, {
        "mappa/degenerate_groups": float(flat),
        "mappa/kl_to_reference": kl_sum / num_tokens if num_tokens else 0.0,
    }


def _returns(one: ScoredSample, rewards: Sequence[float | None], beta: float) -> _Returns:
    sample = one.sample
    mask_T = torch.tensor(sample.loss_mask, dtype=torch.bool)
    kl_T = _kl(one, mask_T, beta)
    returns_T, kl_returns_T = torch.zeros_like(kl_T), torch.zeros_like(kl_T)
    earned: list[float] = []
    for span in sample.spans:
        here = slice(span.start, span.stop)
        if not bool(mask_T[here].any()):
            continue
        reward = rewards[span.turn_index]
        assert reward is not None, "an action without a reward has no trained token"
        earned.append(reward)
        for out_T, score in ((returns_T, reward), (kl_returns_T, 0.0)):
            out_T[here] = returns_to_go(token_rewards(kl_T[here], score, beta, mask_T[here]), mask_T=mask_T[here])
    return _Returns(mask_T, returns_T, kl_returns_T, kl_T, tuple(earned))


def _kl(one: ScoredSample, mask_T: Tensor, beta: float) -> Tensor:
    """k1 per trained token, float64, 0 elsewhere; all 0 where no reference is asked for."""
    if beta == 0:
        return torch.zeros(len(one.sample.ids), dtype=torch.float64)
    if one.old is None or one.reference is None:
        raise ValueError(f"{one.sample.id}: the KL in the reward needs old and reference log-probabilities")
    old_T = torch.tensor(one.old, dtype=torch.float64)
    return k1(log_ratio(old_T, torch.tensor(one.reference, dtype=torch.float64), mask_T))


def _grpo(scored: Sequence[ScoredSample], rewards: Rewards) -> list[Tensor]:
    """The baseline: outcome normalised over the rollouts of one question and agent, the same on all of an agent's
    tokens in a trajectory. Agents after the first do not share an input state, which is why MAPPA has no groups."""
    members: dict[tuple[str, str], dict[str, float]] = {}
    for one in scored:
        if one.sample.num_trained:
            value = next(r for r in rewards[one.sample.trajectory_id] if r is not None)
            members.setdefault((one.sample.group, one.sample.agent), {})[one.sample.trajectory_id] = value
    normed: dict[tuple[str, str], dict[str, float | None]] = {
        key: dict(zip(values, group_advantages(list(values.values())), strict=True)) for key, values in members.items()
    }
    return [
        _constant(one, normed.get((one.sample.group, one.sample.agent), {}).get(one.sample.trajectory_id) or 0.0)
        for one in scored
    ]


def _imitation(scored: Sequence[ScoredSample], rewards: Rewards) -> list[Tensor]:
    """The baseline: advantage 1 on the actions of trajectories with outcome 1, 0 on all others."""
    return [_constant(one, float(all(r == 1.0 for r in rewards[one.sample.trajectory_id]))) for one in scored]


def _constant(one: ScoredSample, value: float) -> Tensor:
    return torch.where(torch.tensor(one.sample.loss_mask, dtype=torch.bool), value, 0.0).double()


def token_weights(
    samples: Sequence[Sample], mappa: MappaConfig, policies: Sequence[str], all_reduce: Reduce = lambda sums: sums
) -> list[Tensor]:
    """1 / (tokens of the policy), or 1 / (actions of the policy * tokens of the action), over all ranks.

    `samples` are those of one optimiser step. Ranks may hold any number of them, none included (M-25).
    """
    units = [_units(sample, mappa) for sample in samples]
    totals = {
        name: _sum([u.sum() for u, s in zip(units, samples, strict=True) if s.policy == name], ()) for name in policies
    }
    summed = dict(zip(policies, all_reduce(torch.stack(list(totals.values()))).tolist(), strict=True))
    return [
        unit_T / summed[sample.policy] if summed[sample.policy] else unit_T
        for sample, unit_T in zip(samples, units, strict=True)
    ]


def _units(sample: Sample, mappa: MappaConfig) -> Tensor:
    mask_T = torch.tensor(sample.loss_mask, dtype=torch.bool)
    if mappa.loss_mean == "token":
        return mask_T.double()
    unit_T = torch.zeros(len(sample.ids), dtype=torch.float64)
    for span in sample.spans:
        here = slice(span.start, span.stop)
        num = int(mask_T[here].sum())
        if num:
            unit_T[here] = mask_T[here].double() / num
    return unit_T


def _sum(tensors: Sequence[Tensor], shape: tuple[int, ...] = (3,)) -> Tensor:
    """The sum of none is zeros, so that a rank without samples takes part in every reduction."""
    return torch.stack([torch.zeros(shape, dtype=torch.float64), *(t.double() for t in tensors)]).sum(0)


def _counts(samples: Sequence[Sample], all_reduce: Reduce) -> dict[str, float]:
    """Actions of trained agents, and how many of them are left out of the gradient, by reason."""
    actions = [sample.reasons[span.start : span.stop] for sample in samples for span in sample.spans]
    held = [a for a in actions if MaskReason.FROZEN not in a]
    truncated = sum(MaskReason.TRUNCATED in a for a in held)
    missing = sum(MaskReason.REWARD_MISSING in a for a in held)
    trained = sum(None in a for a in held)
    counts = torch.tensor([len(held), trained, truncated, missing], dtype=torch.float64)
    total, trained_sum, truncated_sum, missing_sum = all_reduce(counts).tolist()
    return {
        "mappa/actions": total,
        "mappa/actions_trained": trained_sum,
        "mappa/truncation_rate": truncated_sum / total if total else 0.0,
        "mappa/missing_scores": missing_sum,
    }
