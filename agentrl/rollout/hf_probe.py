"""Whether a model computes the same with padding and with a shared prefix as it does alone."""

from __future__ import annotations

import torch

from agentrl.errors import ConfigError
from agentrl.rollout.hf_attention import LINEAR, layer_kinds
from agentrl.rollout.hf_generate import HFPolicy, Row, prefill
from agentrl.types import Key, Prompt, Request, Sampling

_SHARED, _RESTS = 20, (3, 4, 5, 6, 7)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the logits' standard deviation


@torch.inference_mode()
def shared_prefix_limit(policy: HFPolicy) -> int:
    """The longest row whose prefix may be shared: 0 where the probe finds a difference.

    Left padding after a shared prefix moves tokens apart in the cache. A sliding window counts places in the cache,
    so sharing is exact only while the whole row fits the window; the states of linear attention cannot be shared.
    Raises `ConfigError` for a model whose output depends on left padding itself: it cannot be batched here.
    """
    config = policy.model.config.get_text_config()
    window = config.to_dict().get("sliding_window")
    limit = int(config.max_position_embeddings) if window is None else int(window)
    generator = torch.Generator().manual_seed(0)
    vocab = int(policy.model.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    stem = torch.randint(vocab, (_SHARED,), generator=generator).tolist()
    prompts = [stem + torch.randint(vocab, (rest,), generator=generator).tolist() for rest in _RESTS]
    alone_BV = torch.cat([_logits(policy, [prompt], 0) for prompt in prompts])
    padded_BV = _logits(policy, prompts, 0)
    tolerance = _TOLERANCE[policy.model.dtype] * float(alone_BV.std())
    if _difference(padded_BV[:-1], alone_BV[:-1]) > tolerance:  # the last is the longest and gets no padding
        raise ConfigError(
            f"{type(policy.model).__name__} does not compute the same with left padding, so it cannot be batched",
            "use engine.kind: vllm",
        )
    if limit <= _SHARED + max(_RESTS) or LINEAR in layer_kinds(config):
        return 0
    shared_BV = _logits(policy, prompts, limit)
    return limit if _difference(shared_BV, alone_BV) <= tolerance else 0


def _difference(one_BV: torch.Tensor, other_BV: torch.Tensor) -> float:
    """The mean distance of two rows' logits, at the median row: a fault moves every row, while the rounding of bfloat16
    now and then moves one by far."""
    return float((one_BV - other_BV).abs().mean(-1).median())


def _logits(policy: HFPolicy, prompts: list[list[int]], share_limit: int) -> torch.Tensor:
    rows = [
        Row(Request("probe", Prompt.of(ids), Sampling(), Key("probe", 0, "", 0, 0, 0)), 1, [0.0], frozenset())
        for ids in prompts
    ]
    return prefill(policy, rows, share_limit=share_limit).logits_BV
