from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantage import group_advantages
from agentrl.algo.loss import (
    clipped_surrogate,
    clipped_tokens,
    cross_entropy_from_logprobs,
    policy_loss,
)

tokens = st.lists(
    st.tuples(
        st.floats(-30, 0),
        st.floats(-30, 0),
        st.sampled_from([-3.0, -0.7, 0.0, 0.2, 2.5]),
        st.sampled_from([0.0, 0.1, 0.5]),
    ),
    min_size=1,
    max_size=24,
)


def columns(rows: list[tuple[float, float, float, float]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "has_gradient"),
    [(1.5, 1.0, 1.2, False), (1.5, -1.0, -1.5, True), (0.5, 1.0, 0.5, True), (0.5, -1.0, -0.8, False)],
)
def test_l2_m15_clip_vectors(ratio: float, advantage: float, surrogate: float, has_gradient: bool) -> None:
    logratio_T = torch.tensor([math.log(ratio)], requires_grad=True)
    advantages_T = torch.tensor([advantage])
    value_T = clipped_surrogate(logratio_T, advantages_T, 0.2, 0.2)
    assert value_T.tolist() == pytest.approx([surrogate])
    (gradient_T,) = torch.autograd.grad(value_T.sum(), logratio_T)
    assert gradient_T.tolist() == pytest.approx([ratio * advantage if has_gradient else 0.0])
    assert clipped_tokens(logratio_T, advantages_T, 0.2, 0.2).tolist() == [not has_gradient]
    loss = policy_loss(logratio_T.detach(), torch.zeros(1), advantages_T, torch.ones(1)).loss
    assert float(loss.detach()) == pytest.approx(-surrogate)


def test_l2_clip_range_may_be_asymmetric() -> None:
    logratio_T = torch.tensor([1.25, 1.25, 0.85]).log()
    value_T = clipped_surrogate(logratio_T, torch.tensor([1.0, -1.0, -1.0]), 0.1, 0.28)
    assert value_T.tolist() == pytest.approx([1.25, -1.25, -0.9])


def test_gradient_at_ratio_one_is_the_full_advantage() -> None:
    current_T = torch.tensor([-0.3, -4.0], requires_grad=True)
    out = policy_loss(current_T, current_T.detach().clone(), torch.tensor([2.0, -1.0]), torch.tensor([0.25, 0.5]))
    (gradient_T,) = torch.autograd.grad(out.loss, current_T)
    assert gradient_T.tolist() == pytest.approx([-0.5, 0.5])
    assert not out.clipped_T.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.0, -1e30])
def test_masked_tokens_have_ratio_one_and_no_gradient_whatever_stands_there(bad: float) -> None:
    rest = {"current": [-1.0, -2.0], "old": [-1.2, -1.9], "advantages": [1.0, -0.5]}
    current_T = torch.tensor([rest["current"][0], bad, rest["current"][1]], requires_grad=True)
    old_T = torch.tensor([rest["old"][0], bad, rest["old"][1]])
    advantages_T = torch.tensor([rest["advantages"][0], bad, rest["advantages"][1]])
    out = policy_loss(current_T, old_T, advantages_T, torch.tensor([0.5, 0.0, 0.25]))
    (gradient_T,) = torch.autograd.grad(out.loss, current_T)
    assert float(out.ratio_T[1]) == 1.0
    assert float(out.logratio_T[1]) == 0.0
    assert float(gradient_T[1]) == 0.0
    assert not bool(out.clipped_T[1])
    alone = policy_loss(
        torch.tensor(rest["current"]),
        torch.tensor(rest["old"]),
        torch.tensor(rest["advantages"]),
        torch.tensor([0.5, 0.25]),
    )
    assert torch.equal(out.loss.detach(), alone.loss)


def test_masked_logits_of_minus_infinity_survive_backward_through_log_softmax() -> None:
    logits_TV = torch.tensor([[0.1, 0.2], [-math.inf, 0.0]], requires_grad=True)
    current_T = torch.log_softmax(logits_TV, -1)[:, 0]
    policy_loss(current_T, torch.tensor([-0.7, -math.inf]), torch.ones(2), torch.tensor([1.0, 0.0])).loss.backward()
    assert logits_TV.grad is not None
    assert torch.equal(logits_TV.grad[1], torch.zeros(2))


@pytest.mark.parametrize("difference", [20.0, -20.0, 900.0, -900.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(difference: float, advantage: float) -> None:
    current_T = torch.tensor([difference], requires_grad=True)
    out = policy_loss(current_T, torch.zeros(1), torch.tensor([advantage]), torch.ones(1))
    (gradient_T,) = torch.autograd.grad(out.loss, current_T)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(gradient_T).all()
    assert torch.isfinite(out.ratio_T).all()


def test_nan_at_a_trained_token_stays_visible() -> None:
    loss = policy_loss(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), torch.ones(1)).loss
    assert torch.isnan(loss)


@pytest.mark.parametrize("outcomes", [[1.0] * 4, [0.0] * 4, [1.0], [None, None, 1.0]])
def test_a12_groups_without_signal_give_exactly_zero_gradient(outcomes: list[float | None]) -> None:
    advantages_T = torch.tensor([a or 0.0 for a in group_advantages(outcomes)])
    current_T = torch.linspace(-2, -1, len(outcomes)).requires_grad_()
    out = policy_loss(current_T, current_T.detach() - 0.5, advantages_T, torch.full_like(advantages_T, 0.25))
    (gradient_T,) = torch.autograd.grad(out.loss, current_T)
    assert float(out.loss.detach()) == 0.0
    assert torch.equal(gradient_T, torch.zeros(len(outcomes)))


@pytest.mark.parametrize(("advantage", "weight", "direction"), [(1.0, 1.0, 1), (-1.0, 1.0, -1), (1.0, 0.0, 0)])
def test_l3_one_step_raises_winners_lowers_losers_and_leaves_masked_samples(
    advantage: float, weight: float, direction: int
) -> None:
    logits_V = torch.tensor([0.2, -0.1, 0.4, 0.0, -0.5], requires_grad=True)
    sampled = 2
    before_T = torch.log_softmax(logits_V, 0)[[sampled]]
    policy_loss(before_T, before_T.detach(), torch.tensor([advantage]), torch.tensor([weight])).loss.backward()
    torch.optim.SGD([logits_V], lr=0.01).step()
    change = float((torch.log_softmax(logits_V, 0)[sampled] - before_T[0]).detach())
    assert (change > 1e-4) - (change < -1e-4) == direction
    assert direction or change == 0.0


@given(tokens, st.integers(1, 8))
def test_the_sum_does_not_depend_on_the_micro_batch_split(
    rows: list[tuple[float, float, float, float]], num_parts: int
) -> None:
    current_T, old_T, advantages_T, weights_T = columns(rows)
    current_T.requires_grad_()
    whole = policy_loss(current_T, old_T, advantages_T, weights_T)
    (expected_T,) = torch.autograd.grad(whole.loss, current_T)
    size = -(-len(rows) // num_parts)
    losses = [
        policy_loss(*(x[start : start + size] for x in (current_T, old_T, advantages_T, weights_T))).loss
        for start in range(0, len(rows), size)
    ]
    (gradient_T,) = torch.autograd.grad(torch.stack(losses).sum(), current_T)
    assert torch.allclose(gradient_T, expected_T, rtol=1e-9, atol=1e-9)


@given(tokens)
def test_clipped_tokens_are_those_whose_gradient_vanished(rows: list[tuple[float, float, float, float]]) -> None:
    current_T, old_T, advantages_T, weights_T = columns(rows)
    current_T.requires_grad_()
    out = policy_loss(current_T, old_T, advantages_T, weights_T)
    (gradient_T,) = torch.autograd.grad(out.loss, current_T)
    should_move_T = out.active_T & (advantages_T != 0) & ~out.clipped_T & (out.logratio_T.abs() < 20)
    assert (gradient_T[out.clipped_T] == 0).all()
    assert (gradient_T[should_move_T] != 0).all()
    assert not (out.clipped_T & ~out.active_T).any()


def test_no_active_token_gives_a_zero_loss_that_can_run_backward() -> None:
    for length in (0, 3):
        current_T = torch.zeros(length, requires_grad=True)
        zeros_T = torch.zeros(length)
        out = policy_loss(current_T, zeros_T, zeros_T, zeros_T)
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0


@pytest.mark.parametrize("wrong", [(), (1,), (3,), (5,), (4, 1)])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_values_of_another_shape_are_refused_not_broadcast(wrong: tuple[int, ...], place: int) -> None:
    inputs = [torch.zeros(4) for _ in range(4)]
    inputs[place] = torch.zeros(wrong)
    with pytest.raises(ValueError, match="one value per token"):
        policy_loss(*inputs)


def test_old_advantages_and_weights_are_constants() -> None:
    inputs = [torch.full((2,), v, requires_grad=True) for v in (-1.0, -1.1, 1.0, 0.5)]
    policy_loss(*inputs).loss.backward()
    assert [x.grad is not None for x in inputs] == [True, False, False, False]


def test_bfloat16_logprobs_are_subtracted_and_summed_in_float32() -> None:
    current_T = torch.full((4096,), -0.00390625, dtype=torch.bfloat16, requires_grad=True)
    old_T = torch.full((4096,), -4.0, dtype=torch.bfloat16)  # the difference has no bfloat16 form
    weights_T = torch.full((4096,), 1 / 4096, dtype=torch.bfloat16)
    out = policy_loss(current_T, old_T, torch.full((4096,), -1.0, dtype=torch.bfloat16), weights_T)
    assert float(out.logratio_T[0]) == 3.99609375
    assert out.loss.dtype == torch.float32
    assert float(out.loss.detach()) == pytest.approx(math.exp(3.99609375), rel=1e-5)


def test_cross_entropy_is_the_weighted_negative_logprob_without_masked_tokens() -> None:
    logprobs_T = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    loss = cross_entropy_from_logprobs(logprobs_T, torch.tensor([0.5, 0.0, 0.5]))
    assert float(loss.detach()) == pytest.approx(2.0)
    (gradient_T,) = torch.autograd.grad(loss, logprobs_T)
    assert gradient_T.tolist() == [-0.5, 0.0, -0.5]


def test_an_empty_clip_range_is_refused() -> None:
    with pytest.raises(ValueError, match="clip range"):
        clipped_surrogate(torch.zeros(1), torch.zeros(1), 0.0, 0.2)
