"""Who earned what in MAPPA: REINFORCE++ on per-action rewards (section 3.1), and the baselines beside it.

Per action with trained tokens 1..L, reward rho, and k_l = log pi_old - log pi_ref at its token l:

    r_l = -beta k_l + [l = L] rho,   G_l = sum_{m >= l} r_m,   A_l = (G_l - mu) / sqrt(max(var, 1e-8))

mu and var are the mean and population variance of G over all trained tokens of one normalisation group (a policy, or
an agent), taken once, by the driver: no number of trainer ranks can change them. Groups of prompts do not exist here
(M-14). Where the rewards of a group vary by less than 1e-6, nothing is whitened and the raw KL returns pull to the
reference (M-13).

Deviations from the published code: one normalisation, not two; truncated and missing actions are in no statistic;
k is held within +-20. Shape suffix: _T token positions of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

Rewards = Mapping[str, Sequence[float | None]]
"""Trajectory id -> reward of each of its turns' actions."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Credited samples in the order given, and what the step's metrics report."""

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
) -> Credit:
    """Credit all samples of a step.

    `groups` are the recipe's `normalisation_groups`. With a KL in the reward each sample needs `old` and `reference`
    log-probabilities (`ValueError` without). The weights make the loss a mean within each policy: over tokens, or over
    actions.
    """
    if mappa.credit == "grpo":
        advantages, metrics = _grpo(scored, rewards), dict[str, float]()
    elif mappa.credit == "supervised":
        advantages, metrics = _imitation(scored, rewards), dict[str, float]()
    else:
        advantages, metrics = _reinforce(scored, rewards, mappa, groups)
    weights = token_weights([one.sample for one in scored], mappa)
    credited = [
        CreditedSample(one, tuple(a.tolist()), tuple(w.tolist()))
        for one, a, w in zip(scored, advantages, weights, strict=True)
    ]
    return Credit(tuple(credited), metrics | _counts([one.sample for one in scored]))


def group_of(sample: Sample, mappa: MappaConfig) -> str:
    """The normalisation group of a sample."""
    return sample.policy if mappa.normalise_over == "policy" else sample.agent


def _reinforce(
    scored: Sequence[ScoredSample], rewards: Rewards, mappa: MappaConfig, groups: Sequence[str]
) -> tuple[list[Tensor], dict[str, float]]:
    found = [_returns(one, rewards[one.sample.trajectory_id], mappa.kl_coef) for one in scored]
    advantages = [torch.zeros(len(one.sample.ids), dtype=torch.float64) for one in scored]
    flat, kl_sum, num_tokens = 0, 0.0, 0.0
    for group in groups:
        mine = [i for i, one in enumerate(scored) if group_of(one.sample, mappa) == group]
        actions = torch.tensor([r for i in mine for r in found[i].rewards], dtype=torch.float64)
        return_moments_3 = _sum([moments(found[i].returns_T, found[i].mask_T) for i in mine])
        reward_moments_3 = moments(actions, torch.ones_like(actions, dtype=torch.bool))
        kl_moments_3 = _sum([moments(found[i].kl_T, found[i].mask_T) for i in mine])
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


def token_weights(samples: Sequence[Sample], mappa: MappaConfig) -> list[Tensor]:
    """1 / (tokens of the policy), or 1 / (actions of the policy * tokens of the action).

    `samples` are those of one optimiser step, all of them: trainer ranks add gradients up as they come (M-25).
    """
    units = [_units(sample, mappa) for sample in samples]
    totals: dict[str, float] = {}
    for sample, unit_T in zip(samples, units, strict=True):
        totals[sample.policy] = totals.get(sample.policy, 0.0) + float(unit_T.sum())
    return [unit_T / (totals[s.policy] or 1.0) for s, unit_T in zip(samples, units, strict=True)]


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


def _sum(moments_3: Sequence[Tensor]) -> Tensor:
    """The moments of all samples together; zeros for none."""
    return torch.stack([torch.zeros(3, dtype=torch.float64), *(m.double() for m in moments_3)]).sum(0)


def _counts(samples: Sequence[Sample]) -> dict[str, float]:
    """Actions of trained agents, and how many of them are left out of the gradient, by reason."""
    actions = [sample.reasons[span.start : span.stop] for sample in samples for span in sample.spans]
    held = [a for a in actions if MaskReason.FROZEN not in a]
    truncated = sum(MaskReason.TRUNCATED in a for a in held)
    missing = sum(MaskReason.REWARD_MISSING in a for a in held)
    trained = sum(None in a for a in held)
    return {
        "mappa/actions": float(len(held)),
        "mappa/actions_trained": float(trained),
        "mappa/truncation_rate": truncated / len(held) if held else 0.0,
        "mappa/missing_scores": float(missing),
    }
