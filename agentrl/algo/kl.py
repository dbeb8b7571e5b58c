"""Per-token KL estimators from log-ratios (k1, k2, k3 after Schulman, "Approximating KL Divergence", 2020).

Everywhere `logratio_T` = log pi - log pi_ref at tokens sampled from pi, and KL means KL(pi || pi_ref). What an
estimator is worth as a value and as a loss are two questions. For x ~ pi, with gradients through pi only:

| estimator | value      | mean gradient when minimised as a loss                                               |
|-----------|------------|--------------------------------------------------------------------------------------|
| k1        | unbiased   | 0: the reference drops out, so k1 in the loss does not see it. Use it in the reward  |
| k2        | biased     | exactly that of KL(pi, pi_ref)                                                       |
| k3        | unbiased   | that of the reverse direction, KL(pi_ref, pi); equal to the above only near pi_ref   |

The score term (the gradient of the sampling distribution) is missing in all three; `corrected_kl` supplies it.
Shape suffix: _T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.algo.ratio import clamp_log_ratio, log_ratio, same_shape, upcast

KlEstimator = Literal["k1", "k2", "k3"]


def k1(logratio_T: Tensor) -> Tensor:
    """log pi/pi_ref. Unbiased, signed, noisy. Belongs in the reward (MAPPA section 3.1), detached.

    Clamped to +-20 like all three.
    """
    return clamp_log_ratio(logratio_T)


def k2(logratio_T: Tensor) -> Tensor:
    """(log pi/pi_ref)^2 / 2. Biased value, low variance; its gradient logratio * grad log pi is the exact one."""
    return 0.5 * clamp_log_ratio(logratio_T).square()


def k3(logratio_T: Tensor) -> Tensor:
    """pi_ref/pi - 1 - log pi_ref/pi. Unbiased and never negative (up to rounding); explodes where pi << pi_ref.

    Its gradient is (1 - pi_ref/pi) * grad log pi. At a log-ratio of -20 the value is 4.9e8, finite in float32.
    """
    clamped_T = clamp_log_ratio(logratio_T)
    return torch.expm1(-clamped_T) + clamped_T


def kl_estimate(logratio_T: Tensor, estimator: KlEstimator) -> Tensor:
    """One of the estimators by name."""
    if estimator == "k1":
        return k1(logratio_T)
    if estimator == "k2":
        return k2(logratio_T)
    if estimator == "k3":
        return k3(logratio_T)
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")


def corrected_kl(kl_T: Tensor, current_over_old_T: Tensor) -> Tensor:
    """exp(log pi - log pi_old) * kl_T: unbiased in value and gradient for tokens sampled from pi_old.

    The gradient through the ratio is the score term, so with k1 or k3 the mean gradient is exactly that of
    KL(pi || pi_ref), on policy (ratio 1, gradient kept) as well as off policy. `current_over_old_T` is the
    log-ratio with gradient; clamped to +-20.
    """
    same_shape(kl_T=kl_T, current_over_old_T=current_over_old_T)
    return clamp_log_ratio(current_over_old_T).exp() * kl_T


def kl_loss(current_T: Tensor, reference_T: Tensor, weights_T: Tensor, estimator: Literal["k2", "k3"] = "k3") -> Tensor:
    """sum_t weight_t * k_t, a scalar with gradient through `current_T`; add it to the loss with a coefficient.

    Tokens of weight 0 count nothing, NaN included. Raises `ValueError` for k1, whose gradient ignores the
    reference, and on unequal shapes.
    """
    if estimator not in ("k2", "k3"):
        raise ValueError(f"{estimator} in the loss ignores the reference: use k2 or k3, or put k1 in the reward")
    same_shape(current_T=current_T, reference_T=reference_T, weights_T=weights_T)
    logratio_T = log_ratio(current_T, reference_T.detach(), weights_T != 0)
    return (upcast(weights_T.detach()) * kl_estimate(logratio_T, estimator)).sum()


@dataclass(frozen=True, slots=True)
class KlStats:
    """Sums over `count` tokens, so that micro-batches and ranks add up, and the largest single value."""

    count: int
    kl_sum: float
    abs_sum: float
    max_kl: float

    @property
    def mean_kl(self) -> float:
        """Mean KL per token; 0.0 for no tokens."""
        return self.kl_sum / self.count if self.count else 0.0

    @property
    def mean_abs(self) -> float:
        """Mean absolute log-ratio per token; 0.0 for no tokens."""
        return self.abs_sum / self.count if self.count else 0.0

    def merge(self, other: KlStats) -> KlStats:
        """The statistics of both sets of tokens together."""
        return KlStats(
            self.count + other.count,
            self.kl_sum + other.kl_sum,
            self.abs_sum + other.abs_sum,
            max(self.max_kl, other.max_kl),
        )


def kl_stats(logratio_T: Tensor, mask_T: Tensor, estimator: KlEstimator = "k3") -> KlStats:
    """Sum, mean absolute log-ratio and per-token maximum over tokens where `mask_T` is True; zeros for none."""
    same_shape(logratio_T=logratio_T, mask_T=mask_T)
    selected_N = logratio_T.detach()[mask_T].double()
    if selected_N.numel() == 0:
        return KlStats(0, 0.0, 0.0, 0.0)
    kl_N = kl_estimate(selected_N, estimator)
    kl_sum, abs_sum, max_kl = torch.stack([kl_N.sum(), selected_N.abs().sum(), kl_N.max()]).tolist()
    return KlStats(selected_N.numel(), kl_sum, abs_sum, max_kl)


def mismatch_kl(behaviour_T: Tensor, trainer_T: Tensor, mask_T: Tensor) -> KlStats:
    """KL(engine || trainer) under the same weights, by k3, with its per-token maximum.

    Both log-probabilities are at temperature 1 over the full softmax, so `mask_T` must leave out
    grammar-constrained tokens and tokens that nobody sampled.
    """
    return kl_stats(log_ratio(behaviour_T.detach(), trainer_T.detach(), mask_T), mask_T)
