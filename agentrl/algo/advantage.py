"""Baselines and normalisation: group-relative advantages, token returns, batch whitening.

Shape suffix: _T token positions, _3 the moments (count, sum, sum of squares).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.ratio import same_shape, upcast


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of the `n` scores that are present. `degenerate`: fewer than two, or all equal: no signal."""

    mean: float
    std: float
    n: int
    degenerate: bool


def group_stats(values: Sequence[float | None], *, unbiased: bool = True) -> GroupStats:
    """Mean and standard deviation of the present values (`None` is a missing score).

    `unbiased` divides by n - 1 (veRL, Search-R1), else by n. Raises `ValueError` for NaN or infinity: a score that
    failed is `None`.
    """
    present = [float(v) for v in values if v is not None]
    if not all(math.isfinite(v) for v in present):
        raise ValueError(f"scores must be finite, and None where missing, got {present}")
    n = len(present)
    if n == 0:
        return GroupStats(0.0, 0.0, 0, True)
    mean = math.fsum(present) / n
    # Equal up to rounding (0.1 + 0.2 against 0.3) is equal; so is a single value.
    spread = max(present) - min(present)
    if spread <= 1e-12 * max(1.0, max(map(abs, present))):
        return GroupStats(mean, 0.0, n, True)
    variance = math.fsum((v - mean) ** 2 for v in present) / (n - 1 if unbiased else n)
    return GroupStats(mean, math.sqrt(variance), n, False)


def group_advantages(values: Sequence[float | None], *, unbiased: bool = True, eps: float = 1e-6) -> list[float | None]:
    """(r - mean) / (std + eps) over one group, one value per input (GRPO; MARS Eq. 5, per question and role).

    `None` stays `None` and does not enter the statistics. A degenerate group (`group_stats`) gives 0.0 for all
    present: unlike veRL, where a single sample keeps A = r, an unbaselined push. Normalise before any sampling.
    """
    stats = group_stats(values, unbiased=unbiased)
    if stats.degenerate:
        return [None if v is None else 0.0 for v in values]
    return [None if v is None else (float(v) - stats.mean) / (stats.std + eps) for v in values]


def token_rewards(kl_T: Tensor, score: float, beta: float, mask_T: Tensor | None = None) -> Tensor:
    """r_t = -beta * k_t, plus the score on the last trained token of the action (MAPPA section 3.1).

    `mask_T` (True = trained; all when None) zeroes the others, NaN included. With no trained token the score has
    nowhere to go and all is 0.
    """
    mask_T = torch.ones_like(kl_T, dtype=torch.bool) if mask_T is None else mask_T
    same_shape(kl_T=kl_T, mask_T=mask_T)
    rewards_T = torch.where(mask_T, -beta * upcast(kl_T.detach()), 0.0)
    trained_N = mask_T.nonzero().flatten()
    if trained_N.numel():
        rewards_T[trained_N[-1]] += score
    return rewards_T


def returns_to_go(rewards_T: Tensor, gamma: float = 1.0, mask_T: Tensor | None = None) -> Tensor:
    """G_t = sum_{m >= t} gamma^(m - t) r_m over one sequence of shape (T,), of tokens or of actions.

    Where `mask_T` is False a position is skipped: neither its reward nor a step of discount counts, and its own
    return is 0. Summed in float64, returned in the dtype of the rewards. Raises `ValueError` for other shapes.
    """
    if rewards_T.dim() != 1:
        raise ValueError(f"returns are per sequence, shape (T,), got {tuple(rewards_T.shape)}")
    mask_T = torch.ones_like(rewards_T, dtype=torch.bool) if mask_T is None else mask_T
    same_shape(rewards_T=rewards_T, mask_T=mask_T)
    rewards_N = rewards_T.detach()[mask_T].double()
    if gamma == 1.0:
        returns_N = rewards_N.flip(0).cumsum(0).flip(0)
    else:
        running, backwards = 0.0, []
        for reward in reversed(rewards_N.tolist()):
            running = reward + gamma * running
            backwards.append(running)
        returns_N = rewards_N.new_tensor(backwards[::-1])
    returns_T = torch.zeros_like(rewards_T, dtype=upcast(rewards_T).dtype)
    returns_T[mask_T] = returns_N.to(returns_T.dtype)
    return returns_T


def moments(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """[count, sum, sum of squares] of the values where `mask_T` is True, float64.

    Moments of several batches or ranks add up; an empty one is zeros, so every rank can take part in a reduction.
    """
    same_shape(values_T=values_T, mask_T=mask_T)
    selected_T = torch.where(mask_T, values_T.detach().double(), 0.0)
    return torch.stack([mask_T.sum().double(), selected_T.sum(), selected_T.square().sum()])


def mean_and_variance(moments_3: Tensor) -> tuple[float, float]:
    """Population mean and variance from `moments`; (0, 0) for no values."""
    count, total, squares = moments_3.tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0)


def whiten_from_moments(values_T: Tensor, mask_T: Tensor, moments_3: Tensor, floor: float = 1e-8) -> Tensor:
    """(v - mu) / sqrt(max(var, floor)) with the statistics of `moments_3`; exactly 0 where `mask_T` is False.

    Token weighted, by the population variance (REINFORCE++; MAPPA section 3.1). `moments_3` is the sum over all batches
    and ranks that share one normalisation, and is applied once.
    """
    same_shape(values_T=values_T, mask_T=mask_T)
    mean, variance = mean_and_variance(moments_3)
    whitened_T = (values_T.detach().double() - mean) / math.sqrt(max(variance, floor))
    return torch.where(mask_T, whitened_T, 0.0).to(upcast(values_T).dtype)


def scores_are_degenerate(score_moments_3: Tensor, threshold: float = 1e-6) -> bool:
    """True when the scores (one per action, without KL, over all ranks) vary by less than `threshold`, or are fewer
    than two. Whitening would then blow rounding and KL noise up to unit variance."""
    return float(score_moments_3[0]) < 2 or mean_and_variance(score_moments_3)[1] < threshold


@dataclass(frozen=True, slots=True)
class BatchAdvantages:
    """Advantages per token, 0 where masked. `degenerate`: the scores held no signal, KL returns were used raw."""

    values_T: Tensor
    degenerate: bool


def batch_advantages(
    returns_T: Tensor,
    kl_returns_T: Tensor,
    mask_T: Tensor,
    return_moments_3: Tensor,
    score_moments_3: Tensor,
    *,
    floor: float = 1e-8,
    threshold: float = 1e-6,
) -> BatchAdvantages:
    """Whitened returns, or the raw KL returns when the scores hold no signal.

    `kl_returns_T` are returns without the score (-beta * sum of the remaining k): with equal scores and no KL the
    advantage is 0, and with KL the pull to the reference keeps its true size. Moments cover all ranks.
    """
    if scores_are_degenerate(score_moments_3, threshold):
        same_shape(kl_returns_T=kl_returns_T, mask_T=mask_T)
        return BatchAdvantages(torch.where(mask_T, upcast(kl_returns_T.detach()), 0.0), True)
    return BatchAdvantages(whiten_from_moments(returns_T, mask_T, return_moments_3, floor), False)
