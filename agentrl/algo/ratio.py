"""Log-ratios of two policies on sampled tokens, safe where tokens are masked.

Shape suffix: _T token positions (any shape works as long as it is the same for all inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20 before `exp`: e^20 is 4.9e8, finite in float32 with room for sums."""


def same_shape(**tensors_T: Tensor) -> None:
    """Raise `ValueError` when shapes differ: broadcasting would train tokens on another token's value."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_T.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"one value per token is needed, got shapes {shapes}")


def upcast(values_T: Tensor) -> Tensor:
    """float32 for narrower types; float32 and float64 stay as they are."""
    return values_T if values_T.dtype in (torch.float32, torch.float64) else values_T.to(torch.float32)


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, active_T: Tensor) -> Tensor:
    """log pi_num - log pi_den at active tokens, exactly 0 elsewhere.

    Inactive inputs are replaced before the subtraction, so NaN or infinity there reaches neither the value nor the
    gradient (which is exactly 0). A NaN at an active token is a fault and stays visible.

    Args: log-probabilities of equal shape, `active_T` bool. Raises `ValueError` on unequal shapes.
    """
    same_shape(numerator_T=numerator_T, denominator_T=denominator_T, active_T=active_T)
    numerator_T, denominator_T = upcast(numerator_T), upcast(denominator_T)
    zero = numerator_T.new_zeros(())
    return torch.where(active_T, numerator_T, zero) - torch.where(active_T, denominator_T, zero.to(denominator_T.dtype))


def clamp_log_ratio(logratio_T: Tensor) -> Tensor:
    """Hold a log-ratio within +-`LOG_RATIO_LIMIT`. The gradient is 0 beyond it."""
    return upcast(logratio_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
