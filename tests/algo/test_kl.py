from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.kl import KlStats, corrected_kl, k1, k2, k3, kl_estimate, kl_loss, kl_stats, mismatch_kl

POLICY_5 = torch.tensor([0.3, -0.4, 0.9, -1.2, 0.1], dtype=torch.float64)
REFERENCE_5 = torch.tensor([-0.6, 0.5, 0.2, -0.3, 0.4], dtype=torch.float64)
STALE_5 = torch.tensor([0.9, -0.9, 0.0, -0.5, 0.3], dtype=torch.float64)


def log_softmax(logits_5: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits_5, 0)


def exact_kl(p_5: torch.Tensor, q_5: torch.Tensor) -> torch.Tensor:
    return (p_5.exp() * (p_5 - q_5)).sum()


def gradient(loss: torch.Tensor, logits_5: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits_5)[0]


def expected_gradient(estimator: str, reference_5: torch.Tensor = REFERENCE_5) -> torch.Tensor:
    """Mean gradient over x ~ pi of the estimator as a loss: enumerated, the sampling distribution held fixed."""
    logits_5 = POLICY_5.clone().requires_grad_()
    policy_5 = log_softmax(logits_5)
    per_symbol_5 = kl_estimate(policy_5 - log_softmax(reference_5), estimator)  # type: ignore[arg-type]
    return gradient((policy_5.detach().exp() * per_symbol_5).sum(), logits_5)


def exact_gradients(reference_5: torch.Tensor = REFERENCE_5) -> tuple[torch.Tensor, torch.Tensor]:
    """Of KL(pi || ref) and of KL(ref || pi)."""
    logits_5 = POLICY_5.clone().requires_grad_()
    policy_5, ref_5 = log_softmax(logits_5), log_softmax(reference_5)
    return gradient(exact_kl(policy_5, ref_5), logits_5), gradient(exact_kl(ref_5, log_softmax(logits_5)), logits_5)


def test_k1_and_k3_are_unbiased_values() -> None:
    policy_5, ref_5 = log_softmax(POLICY_5), log_softmax(REFERENCE_5)
    exact = exact_kl(policy_5, ref_5)
    for estimator in (k1, k3):
        assert torch.allclose((policy_5.exp() * estimator(policy_5 - ref_5)).sum(), exact, atol=1e-12)


def test_k2_as_a_loss_has_the_exact_gradient_of_the_kl() -> None:
    assert torch.allclose(expected_gradient("k2"), exact_gradients()[0], atol=1e-12)


def test_k3_as_a_loss_has_the_gradient_of_the_reverse_direction_and_agrees_near_the_reference() -> None:
    forward, reverse = exact_gradients()
    assert torch.allclose(expected_gradient("k3"), reverse, atol=1e-12)
    assert not torch.allclose(expected_gradient("k3"), forward, atol=1e-3)
    near_5 = POLICY_5 + 1e-3 * torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0], dtype=torch.float64)
    exact_near = exact_gradients(near_5)[0]
    assert float((expected_gradient("k3", near_5) - exact_near).norm() / exact_near.norm()) < 2e-3


def test_k1_as_a_loss_does_not_see_the_reference_but_k2_and_k3_do() -> None:
    moved_5 = REFERENCE_5 + torch.tensor([1.0, 0.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    assert torch.allclose(expected_gradient("k1"), torch.zeros(5, dtype=torch.float64), atol=1e-12)
    for estimator in ("k2", "k3"):
        assert not torch.allclose(expected_gradient(estimator), expected_gradient(estimator, moved_5), atol=1e-2)
    zeros_T = torch.zeros(2)
    with pytest.raises(ValueError, match="k1 in the loss ignores the reference"):
        kl_loss(zeros_T, zeros_T, zeros_T, "k1")  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("old_logits", [POLICY_5, STALE_5])
def test_the_corrected_estimate_is_exact_on_and_off_policy_and_the_plain_one_is_not(
    estimator: str, old_logits: torch.Tensor
) -> None:
    logits_5 = POLICY_5.clone().requires_grad_()
    policy_5, ref_5, old_5 = log_softmax(logits_5), log_softmax(REFERENCE_5), log_softmax(old_logits)
    plain_5 = kl_estimate(policy_5 - ref_5, estimator)  # type: ignore[arg-type]
    corrected = (old_5.exp() * corrected_kl(plain_5, policy_5 - old_5)).sum()
    exact = exact_kl(policy_5, ref_5)
    assert torch.allclose(corrected, exact, atol=1e-12)
    assert torch.allclose(gradient(corrected, logits_5), exact_gradients()[0], atol=1e-12)
    if old_logits is STALE_5:
        assert abs(float(((old_5.exp() * plain_5).sum() - exact).detach())) > 1e-2


def test_equal_policies_have_no_kl_and_no_gradient() -> None:
    current_T = torch.tensor([-0.5, -2.0, -11.0], requires_grad=True)
    for estimator in ("k2", "k3"):
        loss = kl_loss(current_T, current_T.detach().clone(), torch.ones(3), estimator)  # type: ignore[arg-type]
        assert float(loss.detach()) == 0.0
        assert torch.equal(gradient(loss, current_T), torch.zeros(3))


@pytest.mark.parametrize("logratio", [20.0, -20.0, 500.0, -500.0, math.inf, -math.inf])
def test_large_log_ratios_stay_finite_in_value_and_gradient(logratio: float) -> None:
    for estimator in (k1, k2, k3):
        logratio_T = torch.tensor([logratio], requires_grad=True)
        value_T = estimator(logratio_T)
        assert torch.isfinite(value_T).all()
        assert torch.isfinite(gradient(value_T.sum(), logratio_T)).all()
    assert float(k3(torch.tensor(-20.0))) == pytest.approx(math.exp(20) - 21, rel=1e-5)


def test_k3_spikes_where_k1_and_k2_stay_calm_and_the_maximum_shows_it() -> None:
    logratio_T = torch.tensor([0.01] * 99 + [-12.0])
    mask_T = torch.ones(100, dtype=torch.bool)
    stats = {e: kl_stats(logratio_T, mask_T, e) for e in ("k1", "k2", "k3")}  # type: ignore[arg-type]
    assert stats["k3"].max_kl > 1.6e5
    assert stats["k2"].max_kl == pytest.approx(72.0)
    assert stats["k3"].mean_kl > 1000 * stats["k2"].mean_kl


@given(st.lists(st.floats(-25, 25), min_size=1, max_size=30))
def test_k2_and_k3_are_never_negative(logratios: list[float]) -> None:
    logratio_T = torch.tensor(logratios, dtype=torch.float64)
    assert (k2(logratio_T) >= 0).all()
    assert (k3(logratio_T) >= -1e-12).all()


def test_masked_tokens_count_nothing_even_when_nan() -> None:
    current_T = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    reference_T = torch.tensor([-1.5, -1.0, math.nan])
    loss = kl_loss(current_T, reference_T, torch.tensor([0.5, 0.0, 0.0]), "k2")
    assert float(loss.detach()) == pytest.approx(0.5 * 0.125)
    assert gradient(loss, current_T).tolist() == pytest.approx([0.25, 0.0, 0.0])


def test_mismatch_is_measured_token_by_token_over_the_mask_only() -> None:
    behaviour_T = torch.tensor([-1.0, -2.0, 0.0, -0.5])
    trainer_T = torch.tensor([-1.1, -1.8, math.nan, -0.5])
    mask_T = torch.tensor([True, True, False, True])
    stats = mismatch_kl(behaviour_T, trainer_T, mask_T)
    expected = [math.exp(-0.1) - 1 + 0.1, math.exp(0.2) - 1 - 0.2, 0.0]
    assert stats.count == 3
    assert stats.kl_sum == pytest.approx(sum(expected), rel=1e-4)
    assert stats.max_kl == pytest.approx(max(expected), rel=1e-4)
    assert stats.mean_abs == pytest.approx(0.1, rel=1e-4)
    shifted = mismatch_kl(behaviour_T[[0, 1, 3]], behaviour_T[[1, 3, 0]], torch.ones(3, dtype=torch.bool))
    assert shifted.max_kl > 1.0  # same mean log-prob, off by one position


def test_statistics_of_parts_merge_and_none_is_zero() -> None:
    logratio_T = torch.linspace(-1, 2, 7)
    mask_T = torch.tensor([True, False, True, True, True, False, True])
    whole = kl_stats(logratio_T, mask_T)
    merged = kl_stats(logratio_T[:3], mask_T[:3]).merge(kl_stats(logratio_T[3:], mask_T[3:]))
    assert (merged.count, merged.max_kl) == (whole.count, whole.max_kl)
    assert merged.kl_sum == pytest.approx(whole.kl_sum)
    none = kl_stats(logratio_T, torch.zeros(7, dtype=torch.bool))
    assert none == KlStats(0, 0.0, 0.0, 0.0)
    assert none.mean_kl == 0.0 == none.mean_abs


def test_unknown_estimators_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator"):
        kl_estimate(torch.zeros(1), "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one value per token"):
        kl_loss(torch.zeros(3), torch.zeros(1), torch.zeros(3))
