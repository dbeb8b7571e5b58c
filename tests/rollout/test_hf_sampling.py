"""Sampling of one token: temperature, top-k, top-p, in that order, by the inverse CDF."""

from __future__ import annotations

import pytest
import torch

from agentrl.rollout.hf_sampling import RowParams, keep_top, sample, unpack_bitmask
from agentrl.types import Sampling

CPU = torch.device("cpu")


def draw_counts(logits: torch.Tensor, sampling: Sampling, count: int = 20_000) -> torch.Tensor:
    uniforms = (torch.arange(count) + 0.5) / count
    rows = logits.repeat(count, 1)
    tokens, _ = sample(rows, RowParams.of([sampling] * count, CPU), uniforms)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def test_draws_follow_the_distribution_at_the_temperature():
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0, -torch.inf])
    for temperature in (0.5, 1.0, 2.0):
        got = draw_counts(logits, Sampling(temperature=temperature))
        torch.testing.assert_close(got, torch.softmax(logits / temperature, 0), atol=2e-4, rtol=0)


def test_top_k_comes_before_top_p():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # Of the two largest, renormalised to 4/7 and 3/7, the first alone reaches 0.5; of all four it does not.
    assert draw_counts(logits, Sampling(top_k=2, top_p=0.5)).tolist() == [1.0, 0.0, 0.0, 0.0]
    got = draw_counts(logits, Sampling(top_p=0.5))
    torch.testing.assert_close(got, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]), atol=2e-4, rtol=0)


def test_logprobs_are_those_of_temperature_one_before_the_cuts():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    params = RowParams.of([Sampling(temperature=t, top_k=3, top_p=0.6) for t in (0.0, 0.3, 1.0, 2.0, 0.7)], CPU)
    tokens, logprobs = sample(logits.clone(), params, torch.rand(5))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


@pytest.mark.parametrize("vocab", [50, 3000])
def test_the_kept_set_equals_a_plain_sort(vocab):
    generator = torch.Generator().manual_seed(1)
    for scale in (0.1, 3.0):
        logits = scale * torch.randn(6, vocab, generator=generator)
        top_k = torch.tensor([0, 5, 0, 40, vocab + 9, 1])
        top_p = torch.tensor([0.9, 1.0, 0.3, 0.8, 0.95, 0.5])
        kept = torch.isfinite(keep_top(logits, top_k, top_p))
        for r in range(6):
            order = logits[r].argsort(descending=True)
            order = order[: int(top_k[r])] if top_k[r] else order
            probs = logits[r][order].softmax(0)
            inside = order[(probs.cumsum(0) - probs) < top_p[r]]
            assert set(torch.nonzero(kept[r]).squeeze(1).tolist()) == set(inside.tolist())


def test_one_row_off_leaves_the_others_uncut():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    kept = torch.isfinite(keep_top(logits, torch.tensor([0, 4]), torch.tensor([1.0, 1.0])))
    assert kept.sum(1).tolist() == [30, 4]


def test_a_forbidden_token_is_never_drawn_at_the_edges():
    logits = torch.full((2, 8), -torch.inf)
    logits[:, 3], logits[:, 5] = 0.0, 1.0
    edge = float(torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)))
    tokens, _ = sample(logits, RowParams.of([Sampling()] * 2, CPU), torch.tensor([0.0, edge]))
    assert tokens.tolist() == [3, 5]


def test_unpacking_reads_bit_v_of_word_v_over_32():
    words = torch.tensor([[1 << 3, -(1 << 31)], [-1, 0]], dtype=torch.int32)
    bits = unpack_bitmask(words, 64)
    assert torch.nonzero(bits[0]).squeeze(1).tolist() == [3, 63]
    assert bits[1].tolist() == [True] * 32 + [False] * 32
