"""Known text after a prompt with latents: the states that predict it, and its log-probabilities.

Prompts are left-padded and texts right-padded, so every row's text begins in the same column and only its columns
reach the head.

Shapes: B rows, L longest prompt, T longest text, D hidden size, V vocabulary, N text tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.algo.loss import cross_entropy_from_logprobs
from agentrl.errors import ConfigError
from agentrl.rollout.latent_attention import step_attention
from agentrl.rollout.latent_backbone import Backbone, pad_prompts, positions_of
from agentrl.rollout.latent_lead import LeadMemory, leads_of
from agentrl.types import Prompt

_CHUNK = 1024  # positions that go through the head at once


@dataclass(frozen=True, slots=True)
class TextStates:
    """Hidden states (after the final norm) around known text.

    `before_BTD[b, t]` predicts token t, `at_BTD[b, t]` is the state at token t itself. `ids_BT` are the tokens,
    `mask_BT` is True where there is one. `computed` positions of prompts and texts went through the model, all rows
    together (what they share counts once, padding not at all).
    """

    before_BTD: Tensor
    at_BTD: Tensor
    ids_BT: Tensor
    mask_BT: Tensor
    computed: int


def text_states(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[int]],
    *,
    checkpointed: bool = False,
    leads: LeadMemory | None = None,
) -> TextStates:
    """One forward over prompt and text, teacher-forced; gradients flow to the prompts' blocks.

    With `checkpointed` only the input embeddings are kept until the backward pass. With `leads` the ids before the
    first block are computed without a graph, those that all rows share only once. Raises `ConfigError` for an empty
    text or one that does not fit the window.
    """
    if not all(len(text) for text in texts):
        raise ConfigError(
            f"text {[len(t) for t in texts].index(0) + 1} of {len(texts)} is empty", "give each question an answer"
        )
    longest = max(map(len, texts))
    backbone.check_fits(max(map(len, prompts)), longest, "tokens of text")
    before = 0 if leads is None else leads.computed
    lead = leads_of(backbone, prompts, leads, longest)
    shared = 0 if leads is None else leads.computed - before
    embeds_BRD, mask_BR = pad_prompts(backbone, prompts, lead.skip)
    ids_BT = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=backbone.device)
    mask_BT = torch.tensor([[t < len(text) for t in range(longest)] for text in texts], device=backbone.device)
    inputs = torch.cat([embeds_BRD, backbone.embeddings(ids_BT).to(embeds_BRD.dtype)], dim=1)
    mask = torch.cat([lead.mask_BC, mask_BR, mask_BT.long()], dim=1)
    positions = positions_of(mask)[:, -inputs.shape[1] :]

    def run(embeds: Tensor) -> Tensor:
        cached: dict[str, object] = {"use_cache": False}
        if lead.layers:
            cache = lead.open()
            cached = {"past_key_values": cache, "step_cache": cache, "use_cache": True}
        with step_attention(backbone.decoder):
            out = backbone.decoder(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, **cached)
        hidden: Tensor = out.last_hidden_state[:, -longest - 1 :]
        return hidden

    hidden = (
        checkpoint(run, inputs, use_reentrant=False, preserve_rng_state=False)
        if checkpointed and torch.is_grad_enabled()
        else run(inputs)
    )
    own = sum(len(prompt) - lead.shared + len(text) for prompt, text in zip(prompts, texts, strict=True))
    return TextStates(hidden[:, :-1], hidden[:, 1:], ids_BT, mask_BT, shared + own)


def text_logprobs(backbone: Backbone, states: TextStates) -> Tensor:
    """log p(token) of every text token, (B, T) in fp32, 0.0 where there is none. The head runs in fp32, by chunks."""
    hidden_ND, ids_N = states.before_BTD[states.mask_BT], states.ids_BT[states.mask_BT]
    parts = []
    for start in range(0, len(ids_N), _CHUNK):
        chunk = (backbone, hidden_ND[start : start + _CHUNK], ids_N[start : start + _CHUNK])
        recompute = hidden_ND.requires_grad and len(ids_N) > _CHUNK
        parts.append(checkpoint(_logprobs, *chunk, use_reentrant=False) if recompute else _logprobs(*chunk))
    empty_BT = torch.zeros(states.mask_BT.shape, device=hidden_ND.device)
    return empty_BT.masked_scatter(states.mask_BT, torch.cat(parts))


def text_loss(logprobs_BT: Tensor, states: TextStates) -> Tensor:
    """Cross-entropy: the mean over all text tokens of the batch."""
    return cross_entropy_from_logprobs(logprobs_BT, states.mask_BT) / states.mask_BT.sum()


def _logprobs(backbone: Backbone, hidden_ND: Tensor, ids_N: Tensor) -> Tensor:
    logits_NV = head_logits(backbone, hidden_ND)
    return logits_NV.gather(-1, ids_N[:, None]).squeeze(-1) - logits_NV.logsumexp(-1)


def head_logits(backbone: Backbone, hidden_ND: Tensor) -> Tensor:
    """The model's logits (N, V) in fp32: its linear head and, where it has one, its soft cap."""
    head = backbone.model.get_output_embeddings()
    bias = None if head.bias is None else head.bias.float()
    logits_NV = torch.nn.functional.linear(hidden_ND.float(), head.weight.float(), bias)
    cap = backbone.model.config.get_text_config().to_dict().get("final_logit_softcapping")
    return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap


@torch.no_grad()
def head_gap(backbone: Backbone) -> float:
    """Largest difference between `head_logits` and the model's own logits on a short sequence, over their spread: a
    model whose head does more than that cannot be trained through `text_logprobs`."""
    embeds_1LD = backbone.embeddings(torch.arange(1, 9, device=backbone.device)[None])
    own_LV = backbone.model(inputs_embeds=embeds_1LD, use_cache=False).logits[0].float()
    hidden_LD = backbone.decoder(inputs_embeds=embeds_1LD, use_cache=False).last_hidden_state[0]
    return float((head_logits(backbone, hidden_LD) - own_LV).abs().max() / own_LV.std())
