"""The fused head: equal to the plain form, forward and backward, however it is split."""

from __future__ import annotations

import pytest
import torch

from agentrl.update.logprobs import Head, Places, token_logprobs

X, U, N, D, V = 9, 11, 23, 8, 70


def _places(allowed: bool, generator) -> Places:
    """Places that share cells, tokens that share places, targets within the sets."""
    hidden_U = torch.randint(0, X, (U,), generator=generator)
    place_N = torch.randint(0, U, (N,), generator=generator)
    target_N = torch.randint(0, V, (N,), generator=generator)
    temperature_U = torch.tensor([1.0, 0.5, 1.7])[torch.arange(U) % 3]
    if not allowed:
        return Places(hidden_U, temperature_U, None, place_N, target_N)
    open_UV = torch.rand(U, V, generator=generator) < 0.3
    open_UV[place_N, target_N] = True
    open_UV[3] = True
    bits_UW = torch.zeros(U, 3, 32, dtype=torch.int64)
    bits_UW.view(U, 96)[:, :V] = open_UV
    words_UW = (bits_UW << torch.arange(32)).sum(-1)
    words_UW = torch.where(words_UW >= 2**31, words_UW - 2**32, words_UW).to(torch.int32)
    return Places(hidden_U, temperature_U, words_UW, place_N, target_N), open_UV


def _plain(head: Head, hidden_XD, places: Places, open_UV):
    """The definition, by autograd over the whole (N, V)."""
    logits_NV = hidden_XD[places.hidden_U][places.place_N].float() @ head.weight_VD.float().T
    if head.bias_V is not None:
        logits_NV = logits_NV + head.bias_V
    logits_NV = logits_NV * head.scale
    if head.softcap is not None:
        logits_NV = torch.tanh(logits_NV / head.softcap) * head.softcap
    if open_UV is not None:
        logits_NV = logits_NV.masked_fill(~open_UV[places.place_N], -torch.inf)
    scaled_NV = logits_NV / places.temperature_U[places.place_N].unsqueeze(-1)
    pick = (torch.arange(N), places.target_N)
    return scaled_NV.log_softmax(-1)[pick], logits_NV.detach().log_softmax(-1)[pick]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "allowed"),
    [(False, 1.0, None, False), (True, 0.3, None, True), (False, 2.0, 3.0, True), (True, 1.0, 2.0, False)],
)
def test_any_chunk_equals_the_plain_form_forward_and_backward(chunk, bias, scale, softcap, allowed):
    generator = torch.Generator().manual_seed(1)
    made = _places(allowed, generator)
    places, open_UV = made if allowed else (made, None)
    g_N = torch.randn(N, generator=generator)
    results = []
    for fused in (True, False):
        leaves = [torch.randn(X, D, generator=generator.manual_seed(2)), torch.randn(V, D, generator=generator)]
        leaves.append(torch.randn(V, generator=generator))
        leaves = [leaf.requires_grad_() for leaf in leaves]
        hidden_XD, weight_VD, bias_V = leaves
        head = Head(weight_VD, bias_V if bias else None, scale, softcap)
        if fused:
            out = token_logprobs(head, hidden_XD, places, chunk=chunk)
            current_N, plain_N = out.current_N, out.plain_N
            assert not plain_N.requires_grad
        else:
            current_N, plain_N = _plain(head, hidden_XD, places, open_UV)
        (current_N * g_N).sum().backward()
        results.append((current_N.detach(), plain_N, hidden_XD.grad, weight_VD.grad, bias_V.grad if bias else None))
    for ours, theirs in zip(*results, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_bf16_head_loses_nothing_forward_and_little_backward(chunk):
    generator = torch.Generator().manual_seed(0)
    places = _places(False, generator)
    hidden_XD = torch.randn(X, D, generator=generator).bfloat16().requires_grad_()
    weight_VD = (4 * torch.randn(V, D, generator=generator)).bfloat16().requires_grad_()
    wide = [hidden_XD.detach().float().requires_grad_(), weight_VD.detach().float().requires_grad_()]
    before = torch.backends.mkldnn.matmul.fp32_precision
    out = token_logprobs(Head(weight_VD), hidden_XD, places, chunk=chunk)
    out.current_N.sum().backward()
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    current_N, plain_N = _plain(Head(wide[1]), wide[0], places, None)
    current_N.sum().backward()
    torch.testing.assert_close(out.current_N, current_N, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.plain_N, plain_N, rtol=1e-5, atol=1e-4)
    for ours, theirs in ((hidden_XD.grad, wide[0].grad), (weight_VD.grad, wide[1].grad)):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 5e-3


def test_a_sink_takes_the_weights_gradient_unrounded_and_adds_to_it():
    generator = torch.Generator().manual_seed(0)
    places = _places(False, generator)
    hidden_XD = torch.randn(X, D, generator=generator).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).requires_grad_()
    token_logprobs(Head(weight_VD), hidden_XD, places).current_N.sum().backward()
    sink_VD = torch.ones(V, D)
    other_VD = weight_VD.detach().clone().requires_grad_()
    token_logprobs(Head(other_VD, sink_VD=sink_VD), hidden_XD, places, chunk=3).current_N.sum().backward()
    assert other_VD.grad is None
    torch.testing.assert_close(sink_VD - 1, weight_VD.grad, rtol=1e-5, atol=1e-5)


def test_temperature_zero_counts_as_one():
    places = Places(torch.tensor([0]), torch.tensor([0.0]), None, torch.tensor([0]), torch.tensor([5]))
    hidden_XD, head = torch.randn(1, D), Head(torch.randn(V, D))
    out = token_logprobs(head, hidden_XD, places)
    assert out.current_N == out.plain_N
    assert torch.isfinite(out.current_N).all()
