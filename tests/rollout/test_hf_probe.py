"""The probe for padding and shared prefixes tells a faulty model from the rounding of one row."""

from __future__ import annotations

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.models import resolve
from agentrl.rollout import hf_probe
from agentrl.rollout.engine import load_hf_policy
from agentrl.rollout.hf_attention import use_prefix_attention


@pytest.fixture(scope="module")
def policy():
    policy = load_hf_policy(resolve("tiny-llama"), "float32")
    use_prefix_attention(policy.model.eval())
    return policy


def _moved(monkeypatch, rows: slice, when) -> None:
    real = hf_probe._logits

    def logits(policy, prompts, share_limit):
        out_BV = real(policy, prompts, share_limit).clone()
        if len(prompts) > 1 and when(share_limit):
            out_BV[rows] += 10 * out_BV.std()
        return out_BV

    monkeypatch.setattr(hf_probe, "_logits", logits)


def test_rounding_that_moves_one_row_is_no_fault(policy, monkeypatch):
    sound = hf_probe.shared_prefix_limit(policy)
    assert sound > 0
    _moved(monkeypatch, slice(0, 1), lambda limit: True)
    assert hf_probe.shared_prefix_limit(policy) == sound


def test_padding_that_moves_every_row_is_refused(policy, monkeypatch):
    _moved(monkeypatch, slice(None), lambda limit: limit == 0)
    with pytest.raises(ConfigError, match="left padding"):
        hf_probe.shared_prefix_limit(policy)


def test_a_prefix_that_moves_every_row_is_not_shared(policy, monkeypatch):
    _moved(monkeypatch, slice(None), lambda limit: limit > 0)
    assert hf_probe.shared_prefix_limit(policy) == 0


def test_rows_differ_by_the_median_row(policy):
    zero, moved = torch.zeros(3, 4), torch.tensor([[0.0] * 4, [2.0] * 4, [9.0] * 4])
    assert hf_probe._difference(zero, moved) == 2.0
