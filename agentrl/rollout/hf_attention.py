"""A key-value cache with one copy of a shared prefix, and the attention that reads it.

A stock cache repeats the prefix for every row, repeats key heads for grouped queries, and copies itself at every
token. Here rows keep only what is their own, in a buffer with room for the completion. Attention over the prefix is
one product for all rows, attention over a row's own part another, and the two are merged by their normalisers:

    softmax over [prefix, own] = w * softmax(prefix) + (1 - w) * softmax(own),  w = sigmoid(lse_prefix - lse_own)

(as in cascade inference; Juravsky et al. 2024, "Hydragen", section 3.1). Exact up to rounding, accumulated in fp32.
On other devices than the CPU the prefix is spread over the rows and the stock attention used.

Layers with linear attention (as in Qwen3.5) keep a state that sums the past up instead of keys and values: it can
neither be shared between rows nor cut back, but it is carried on like any cache.

Shapes: B rows, H query heads, K key heads, G = H / K, Q queries, P prefix, L own length, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer, get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.errors import ConfigError

ATTENTION = "agentrl_shared_prefix"
LINEAR = "linear_attention"
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", LINEAR)


class PrefixLayer(DynamicLayer):
    """One layer's cache: `prefix_keys` and `prefix_values` (1, K, P, D) once, `keys` and `values` (B, K, L, D)."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.prefix_keys: torch.Tensor | None = None
        self.prefix_values: torch.Tensor | None = None

    @property
    def prefix_length(self) -> int:
        return 0 if self.prefix_keys is None else self.prefix_keys.shape[2]

    def share(self) -> None:
        """What one row holds so far becomes the prefix of all rows to come."""
        self.prefix_keys, self.prefix_values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        self.keys = self.values = None
        self.is_initialized, self.length = False, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return the rows' own keys and values, without the prefix."""
        end = self.length + key_states.shape[2]
        if not self.is_initialized:
            batch, heads, _, size = key_states.shape
            room = max(self.capacity, end)
            self.keys = key_states.new_empty(batch, heads, room, size)
            self.values = value_states.new_empty(batch, heads, room, value_states.shape[3])
            self.is_initialized = True
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.prefix_length + self.length

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for buffer in (self.keys, self.values):
            buffer[: len(indices), :, : self.length] = buffer[indices, :, : self.length]
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]


class StateLayer(LinearAttentionLayer):
    """A linear-attention layer's states: those of its convolution and its recurrence, one per row."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)  # type: ignore[arg-type]


class PrefixCache(Cache):
    """The layers' caches, by `kinds` (see `layer_kinds`). `capacity` is the room for a row's own part: the rest of its
    prompt and its completion."""

    def __init__(self, kinds: Sequence[str], capacity: int) -> None:
        super().__init__(layers=[StateLayer() if kind == LINEAR else PrefixLayer(capacity) for kind in kinds])
        self._biases: list[tuple[torch.Tensor, torch.Tensor]] = []

    def share(self) -> None:
        for layer in self.layers:
            layer.share()

    def bias(self, mask_B1QT: torch.Tensor, prefix: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask over the rows' own part as an additive bias (B, 1, G * Q, L); made once for all layers."""
        for mask, bias in self._biases:
            if mask is mask_B1QT:
                return bias
        own_B1QL = mask_B1QT[..., prefix:]
        # The smallest number, not -inf: a query that sees nothing (padding) stays finite.
        bias = torch.zeros_like(own_B1QL, dtype=dtype).masked_fill_(~own_B1QL, torch.finfo(dtype).min)
        bias = bias.repeat(1, 1, groups, 1)
        # Two are in use where full and sliding layers alternate.
        self._biases = [*self._biases[-1:], (mask_B1QT, bias)]
        return bias


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer of a model's text config, by which its cache is made.

    Raises `ConfigError` for a kind whose memory is neither keys and values nor the state of a linear attention.
    """
    kinds = tuple(get_layer_types_and_kwargs(config)[0])
    odd = sorted(set(kinds) - set(_KINDS))
    if odd or set(kinds) == {LINEAR}:
        what = f"layers of kind {odd[0]!r}" if odd else "no attention layer besides its linear ones"
        raise ConfigError(
            f"a {config.model_type} model has {what}, whose cache the hf engine does not know",
            "use a model with attention layers, or engine.kind: vllm where no latents are needed",
        )
    return kinds


def use_prefix_attention(model: Any) -> None:
    """Let `model` attend through a `PrefixCache`; without one it attends as before. Raises `ConfigError` for a model
    whose attention is not the plain kind."""
    if not model._supports_sdpa:
        raise ConfigError(
            f"{type(model).__name__} has an attention of its own, which the hf engine cannot batch",
            "use engine.kind: vllm",
        )
    AttentionInterface.register(ATTENTION, prefix_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    prefix_cache: PrefixCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (B, H, Q, D) queries over the shared prefix and the rows' own keys (B, K, L, D)."""
    layer = None if prefix_cache is None else prefix_cache.layers[module.layer_idx]
    prefix = 0 if layer is None else layer.prefix_length
    batch, _, queries, size = query.shape
    plain = layer is None or (attention_mask is None and queries > 1)
    if plain or query.device.type != "cpu" or value.shape[-1] != size:
        if prefix:
            key = torch.cat([layer.prefix_keys.expand(batch, -1, -1, -1), key], dim=2)
            value = torch.cat([layer.prefix_values.expand(batch, -1, -1, -1), value], dim=2)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    heads = key.shape[1]
    groups = query.shape[1] // heads
    scale = size**-0.5 if scaling is None else scaling
    # Queries that share a key head stand in its rows: (B, K, G * Q, D). No key is repeated.
    query_BKRD = query.reshape(batch, heads, groups * queries, size)
    bias = None if attention_mask is None else prefix_cache.bias(attention_mask, prefix, groups, query.dtype)
    out_BKRD, lse_BKR = _flash(query_BKRD, key, value, bias, scale)
    if prefix:
        query_1KSD = query_BKRD.transpose(0, 1).reshape(1, heads, batch * groups * queries, size)
        shared_1KSD, lse_1KS = _flash(query_1KSD, layer.prefix_keys, layer.prefix_values, None, scale)
        shared_BKRD = shared_1KSD.view(heads, batch, groups * queries, size).transpose(0, 1)
        lse_shared_BKR = lse_1KS.view(heads, batch, groups * queries).transpose(0, 1)
        weight_BKR1 = torch.sigmoid(lse_shared_BKR - lse_BKR)[..., None]
        out_BKRD = torch.lerp(out_BKRD.float(), shared_BKRD.float(), weight_BKR1).to(query.dtype)
    out_BHQD = out_BKRD.reshape(batch, heads * groups, queries, size)
    return out_BHQD.transpose(1, 2).contiguous(), None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the fp32 log of its normaliser: (B, K, R, D) and (B, K, R)."""
    out_BKRD, lse_BKR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return out_BKRD, lse_BKR
