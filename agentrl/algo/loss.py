"""The clipped surrogate and its relatives, per token.

The loss is -sum_t weight_t * surrogate_t. Every mean (per sequence, per role, over tokens) lives in the weights
(`agentrl.algo.weights`), so splitting a batch into micro-batches cannot change the sum. A weight of 0 masks a token.

Shape suffix: _T token positions (any shape works as long as it is the same for all inputs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.ratio import clamp_log_ratio, log_ratio, same_shape, upcast


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is a scalar with gradient; the per-token fields are detached.

    `ratio_T` is current over old, exactly 1 at masked tokens. `clipped_T` marks active tokens whose gradient the
    clip removed; the clip fraction is `clipped_T.sum() / active_T.sum()`, summed over micro-batches before dividing.
    """

    loss: Tensor
    logratio_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor
    active_T: Tensor


def _check_eps(eps_low: float, eps_high: float) -> None:
    if not (eps_low > 0.0 and eps_high > 0.0):
        raise ValueError(f"clip range needs eps_low > 0 and eps_high > 0, got {eps_low} and {eps_high}")


def clipped_surrogate(logratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) per token, to be maximised (PPO; MARS Eq. 6).

    `logratio_T` is log pi - log pi_old. It is clamped to +-20 first, so a ratio beyond e^20 has no gradient.
    Raises `ValueError` on unequal shapes or an empty clip range.
    """
    _check_eps(eps_low, eps_high)
    same_shape(logratio_T=logratio_T, advantages_T=advantages_T)
    ratio_T = clamp_log_ratio(logratio_T).exp()
    return torch.minimum(ratio_T * advantages_T, ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages_T)


def clipped_tokens(logratio_T: Tensor, advantages_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """True where the surrogate is on its flat part: rho > 1 + eps_high with A > 0, rho < 1 - eps_low with A < 0."""
    _check_eps(eps_low, eps_high)
    same_shape(logratio_T=logratio_T, advantages_T=advantages_T)
    ratio_T = clamp_log_ratio(logratio_T).exp()
    too_high_T = (ratio_T > 1.0 + eps_high) & (advantages_T > 0)
    too_low_T = (ratio_T < 1.0 - eps_low) & (advantages_T < 0)
    return too_high_T | too_low_T


def policy_loss(
    current_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> PolicyLoss:
    """-sum_t weight_t * clipped_surrogate_t.

    `current_T` carries the gradient; `old_T`, advantages and weights are constants. Tokens of weight 0 have ratio
    exactly 1, loss exactly 0 and gradient exactly 0 with respect to `current_T`, whatever values stand there, NaN
    included. With no active token the loss is 0 and still has a gradient (of zeros), so every rank can run backward.

    Raises `ValueError` on unequal shapes: nothing is broadcast.
    """
    same_shape(current_T=current_T, old_T=old_T, advantages_T=advantages_T, weights_T=weights_T)
    active_T = weights_T != 0
    logratio_T = log_ratio(current_T, old_T.detach(), active_T)
    advantages_T = torch.where(active_T, upcast(advantages_T.detach()), 0.0)
    surrogate_T = clipped_surrogate(logratio_T, advantages_T, eps_low, eps_high)
    loss = -(upcast(weights_T.detach()) * surrogate_T).sum()
    constant_T = logratio_T.detach()
    return PolicyLoss(
        loss=loss,
        logratio_T=constant_T,
        ratio_T=clamp_log_ratio(constant_T).exp(),
        clipped_T=clipped_tokens(constant_T, advantages_T, eps_low, eps_high),
        active_T=active_T,
    )


def cross_entropy_from_logprobs(logprobs_T: Tensor, weights_T: Tensor) -> Tensor:
    """-sum_t weight_t * log p_t, a scalar. Tokens of weight 0 count nothing, even when NaN stands there."""
    same_shape(logprobs_T=logprobs_T, weights_T=weights_T)
    active_logprobs_T = torch.where(weights_T != 0, upcast(logprobs_T), 0.0)
    return -(upcast(weights_T.detach()) * active_logprobs_T).sum()
