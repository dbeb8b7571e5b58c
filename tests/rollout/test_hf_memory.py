"""Text batches that keep what their prompts begin with, and completions of a given length."""

from __future__ import annotations

import random

import pytest
import torch

from agentrl.rollout.hf import uniforms
from agentrl.rollout.hf_generate import Row, generate_batch
from agentrl.rollout.latent_cache import PromptMemory
from agentrl.types import Key, Prompt, Request, Sampling

ARCHS = ("llama", "qwen3", "gemma3", "gpt2")


def _rows(
    policy, round_number: int, *, lead: bool = True, stops: bool = True, temperature: float = 0.0, **own
) -> list[Row]:
    """Five prompts: a lead of 20 to 28 ids that is the same in all rounds, and a rest that is not."""
    rows = []
    for b in range(5):
        always = [40 + (b * 7 + i) % 90 for i in range(20 + 2 * b)]
        rng = random.Random(f"{round_number}/{b}")
        prompt = [*always, *(rng.randrange(3, 259) for _ in range(3 + b * round_number % 5))]
        request = Request(
            "p", Prompt.of(prompt), Sampling(temperature, max_tokens=9), Key("x", round_number, "t", b, 0, 0)
        )
        stop_ids = frozenset(policy.eos_ids) if stops else frozenset()
        length = len(always) if lead else 0
        rows.append(Row(request, 9, uniforms(0, request.key, 9), stop_ids, lead=length, **own))
    return rows


@pytest.mark.parametrize("arch", ARCHS)
def test_what_prompts_begin_with_is_computed_once_and_changes_nothing(policy_of, arch):
    policy, memory = policy_of(arch), PromptMemory()
    for round_number in (1, 2, 3):
        rows = _rows(policy, round_number)
        kept = generate_batch(policy, rows, 0, share_limit=0, memory=memory)
        fresh = generate_batch(policy, _rows(policy, round_number), 0, share_limit=0)
        assert [k.ids for k in kept] == [f.ids for f in fresh]
        for k, f in zip(kept, fresh, strict=True):
            torch.testing.assert_close(torch.tensor(k.logprobs), torch.tensor(f.logprobs), atol=1e-4, rtol=0)
        assert [row.reused for row in rows] == ([0] * 5 if round_number == 1 else [20 + 2 * b for b in range(5)])
        for row in rows:
            assert row.computed == len(row.request.prompt) - row.reused + len(row.ids) - 1


def test_rows_that_end_early_leave_the_memory_whole(policy_of):
    policy, memory = policy_of("llama"), PromptMemory()
    rows = _rows(policy, 1)
    for b, row in enumerate(rows[:4]):
        row.max_tokens = 1 + b  # they leave the batch one by one
    generate_batch(policy, rows, 0, share_limit=0, memory=memory)
    kept = generate_batch(policy, _rows(policy, 2), 0, share_limit=0, memory=memory)
    assert [k.ids for k in kept] == [f.ids for f in generate_batch(policy, _rows(policy, 2), 0, share_limit=0)]


def test_a_least_length_forbids_the_end_and_nothing_else(policy_of):
    policy = policy_of("llama")
    policy.model.get_output_embeddings().weight.data[list(policy.eos_ids)] *= 0
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[policy.eos_ids[0]] = 50 * torch.ones(())
    plain = generate_batch(policy, _rows(policy, 1), 0, share_limit=0)
    free = [row for row in plain if row.finish_reason == "stop"]
    assert free, "the end must be likely here for the test to say anything"
    forced = generate_batch(policy, _rows(policy, 1, min_tokens=9), 0, share_limit=0)
    assert all(len(f.ids) == 9 and not set(f.ids) & set(policy.eos_ids) for f in forced)
    assert all(f.finish_reason == "length" and all(f.constrained) for f in forced)
    late = generate_batch(policy, _rows(policy, 1, min_tokens=4), 0, share_limit=0)
    assert any(len(one.ids) >= 5 and one.finish_reason == "stop" for one in late)
