"""Attention for latent steps with gradients: nothing of the prompt is copied per step.

A stock cache concatenates the whole prompt's keys and values at every step, and the backward pass keeps every copy
(and, for grouped queries, one repeated per query head): memory grows with m L. Here a step attends to the prompt's
keys, kept once, and to those of the earlier steps; what is kept per step are its scores and the steps' own keys.

    out = softmax([q K_prompt, q K_steps]) [V_prompt; V_steps]

Exact up to rounding; the softmax runs in fp32. The prompt itself is attended to as `agentrl.models.attention` or torch
does, whichever is faster. Layers with linear attention carry their states on as new tensors,
since a state that is overwritten has no backward pass.

Shapes: B rows, H query heads, K key heads, G = H / K, L prompt length, S steps so far, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.models.attention import plain_attention, plain_is_better
from agentrl.rollout.hf_attention import LINEAR

STEP_ATTENTION = "agentrl_latent_steps"


class StepLayer(DynamicLayer):
    """`keys` and `values` (B, K, L, D) of the prompt, and one (B, K, 1, D) per step. `lead` holds keys and values of
    positions before those that are given first; one row of them stands for all rows."""

    def __init__(self, lead: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.lead = lead
        self.step_keys: list[Tensor] = []
        self.step_values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The prompt first, then one position at a time; returns what is to be attended to first, then what was
        given."""
        if not self.is_initialized:
            if self.lead is not None:
                key_states, value_states = (
                    torch.cat([old.expand(new.shape[0], -1, -1, -1), new], dim=2)
                    for old, new in zip(self.lead, (key_states, value_states), strict=True)
                )
            # Contiguous: a product with a transposed view would copy it at every step, and keep the copies.
            self.keys, self.values, self.is_initialized = key_states.contiguous(), value_states.contiguous(), True
            return self.keys, self.values
        assert key_states.shape[2] == 1, "a latent step is one position"
        self.step_keys.append(key_states)
        self.step_values.append(value_states)
        return key_states, value_states

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the lead and the prompt."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_seq_length(self) -> int:
        if not self.is_initialized:
            return 0 if self.lead is None else self.lead[0].shape[2]
        return self.keys.shape[2] + len(self.step_keys)


class StepStates(LinearAttentionLayer):
    """A linear-attention layer's states, never overwritten: the stock layer copies into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.record_past = True  # keeps the model off its fused step, which overwrites the convolution's state

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """The convolution's input (B, C, new), after the columns that it must still see of the past."""
        assert conv_kernel_size is not None
        past = self.conv_states[state_idx]
        whole = conv_states if past is None else torch.cat([past, conv_states], dim=-1)
        self.conv_states[state_idx] = whole[..., -conv_kernel_size:]
        self.has_previous_state[state_idx] = True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class StepCache(Cache):
    """By `kinds` of layers. `leads` holds each layer's keys and values of leading positions, or nothing."""

    def __init__(self, kinds: Sequence[str], leads: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        lead_of = leads or [None] * len(kinds)
        super().__init__(
            layers=[StepStates() if k == LINEAR else StepLayer(lead) for k, lead in zip(kinds, lead_of, strict=True)]
        )


@contextmanager
def step_attention(decoder: nn.Module) -> Iterator[None]:
    """Within the block the decoder attends through a `StepCache`; calls without one attend as ever."""
    AttentionInterface.register(STEP_ATTENTION, _attend)
    AttentionMaskInterface.register(STEP_ATTENTION, sdpa_mask)
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = STEP_ATTENTION
    try:
        yield
    finally:
        decoder.config._attn_implementation = before


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step_cache: StepCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer = None if step_cache is None else step_cache.layers[module.layer_idx]
    if layer is None or not layer.step_keys:
        if plain_is_better(query, key, attention_mask):
            return plain_attention(query, key, value, attention_mask, scaling), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, heads, _, size = query.shape
    key_heads, length = layer.keys.shape[1], layer.keys.shape[2]
    # Queries that share a key head stand in its rows, so no key is repeated.
    query_BKGD = query.reshape(rows, key_heads, heads // key_heads, size)
    step_keys_BKSD, step_values_BKSD = torch.cat(layer.step_keys, dim=2), torch.cat(layer.step_values, dim=2)
    scores = [query_BKGD @ keys.transpose(2, 3) for keys in (layer.keys, step_keys_BKSD)]
    scores_BKGT = torch.cat(scores, dim=-1).float() * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores_BKGT = scores_BKGT.masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    weights_BKGT = scores_BKGT.softmax(dim=-1).to(query.dtype)
    out_BKGD = weights_BKGT[..., :length] @ layer.values + weights_BKGT[..., length:] @ step_values_BKSD
    return out_BKGD.reshape(rows, 1, heads, size), None
