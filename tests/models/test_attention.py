"""The plain form of attention says what torch's own says, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from agentrl.models.attention import MAX_KEYS, plain_attention, plain_is_better


def _inputs(dtype: torch.dtype, queries: int, keys: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((3, 6, queries, 8), (3, 2, keys, 8), (3, 2, keys, 8))
    return [torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def _mask(queries: int, keys: int) -> torch.Tensor:
    """The last queries of all, after 0, 1 and 2 columns of padding."""
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return torch.stack([seen & (torch.arange(keys) >= pads) for pads in (0, 1, 2)])[:, None]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("queries", "keys", "masked"), [(4, 9, True), (9, 9, True), (9, 9, False), (1, 7, False)])
def test_output_and_gradients_are_those_of_torch(queries, keys, masked, scale):
    mask = _mask(queries, keys) if masked else None
    query, key, value = inputs = _inputs(torch.float64, queries, keys)
    weigh = torch.randn(3, queries, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if queries == keys and masked:
        weigh[1:, :2] = 0.0  # what padding reads differs, and means nothing
    own = plain_attention(query, key, value, mask, scale)
    wide = [t.repeat_interleave(3, dim=1) for t in (key, value)]
    causal = mask is None and queries > 1
    torchs = F.scaled_dot_product_attention(query, *wide, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)
    torch.testing.assert_close(own * (weigh != 0), torchs * (weigh != 0), rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(out, inputs, weigh) for out in (own, torchs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_stays_finite():
    query, key, value = inputs = _inputs(torch.bfloat16, 3, 3)
    out = plain_attention(query, key, value, torch.zeros(3, 1, 3, 3, dtype=torch.bool))
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.float().sum(), inputs))


def test_in_bf16_it_is_as_near_to_the_exact_result_as_torchs_own():
    narrow = _inputs(torch.bfloat16, 24, 40)
    exact = [t.detach().double() for t in narrow]
    mask = _mask(24, 40)
    wanted = plain_attention(*exact, mask)
    wide = [t.repeat_interleave(3, dim=1) for t in narrow[1:]]
    torchs = F.scaled_dot_product_attention(narrow[0], *wide, attn_mask=mask).transpose(1, 2)
    off = [(out.double() - wanted).abs().mean().item() for out in (plain_attention(*narrow, mask), torchs)]
    assert off[0] < 2 * off[1]


def test_it_is_chosen_for_short_keys_in_bf16_with_a_gradient():
    query, key, _ = _inputs(torch.bfloat16, 4, 9)
    mask = _mask(4, 9)
    assert plain_is_better(query, key, mask)
    assert not plain_is_better(query.detach(), key.detach(), mask)
    assert not plain_is_better(query.float(), key.float(), mask)
    assert not plain_is_better(query, key, None)  # 4 queries of 9 keys without a mask: which ones is not known
    assert not plain_is_better(query, torch.zeros(3, 2, MAX_KEYS + 1, 8, dtype=torch.bfloat16), mask)
    with torch.no_grad():
        assert not plain_is_better(query, key, mask)
