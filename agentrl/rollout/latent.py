"""Latent rollouts: a frozen model thinks m steps in its own hidden space, without a head and without sampling.

    h_1 = last hidden state (after the final norm) of the prompt;  e_k = link(h_k) is fed as the next input;
    h_{k+1} = last hidden state with e_k appended.  h_m is stored and never fed back: m states from m forwards.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, section 3, and its released code, which re-runs the whole
prefix at each step. Here the prompt is computed once into a key-value cache: L + m - 1 positions instead of
m L + m (m - 1) / 2. The link is any callable (..., D) -> (..., D); its output is cast to the model's dtype.

Rows are left-padded, so the last column is always live, and positions count a row's own tokens only.

Shapes: B rows, L longest prompt, m latent steps, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.errors import ConfigError, RunFailedError
from agentrl.rollout.hf_attention import LINEAR
from agentrl.rollout.latent_attention import step_attention
from agentrl.rollout.latent_backbone import Backbone, pad_prompts, positions_of
from agentrl.rollout.latent_cache import LatentCache, PromptMemory
from agentrl.rollout.latent_lead import LeadMemory, leads_of
from agentrl.types import Embeddings, LatentAction, Prompt

LinkFn = Callable[[Tensor], Tensor]
Gradient = Literal["full", "first"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """The raw states of a batch of latent rollouts, and what they cost.

    `states_BmD` in the model's dtype; `norms_Bm` their lengths (fp32, detached); per row: the prompt's positions, how
    many of them were taken from memory, and the forward positions computed (padding not counted).
    """

    states_BmD: Tensor
    norms_Bm: Tensor
    prompt_positions: tuple[int, ...]
    reused: tuple[int, ...]
    computed: tuple[int, ...]

    def actions(self, agent: str) -> tuple[LatentAction, ...]:
        """One accounting value per row."""
        steps = self.states_BmD.shape[1]
        rows = zip(self.computed, self.norms_Bm.tolist(), strict=True)
        return tuple(LatentAction(agent, steps, computed, tuple(norms)) for computed, norms in rows)


def fill_slots(parts: Sequence[Sequence[int]], blocks: Sequence[Tensor]) -> Prompt:
    """[parts_0; blocks_0; parts_1; ...]: n + 1 runs of ids around n blocks of shape (k, D), in order.

    An empty block (m = 0) leaves nothing in its slot. Raises `ConfigError` when slots and blocks do not match in
    number, and `RunFailedError` for a block that holds NaN or infinity.
    """
    if len(parts) != len(blocks) + 1:
        raise ConfigError(
            f"a prompt with {len(parts) - 1} slots cannot take {len(blocks)} latent blocks",
            "write one slot marker per incoming edge",
        )
    segments: list[tuple[int, ...] | Embeddings] = [tuple(parts[0])]
    for index, (block, ids) in enumerate(zip(blocks, parts[1:], strict=True)):
        if not bool(torch.isfinite(block.detach()).all()):
            raise RunFailedError(
                f"the latent block of slot {index + 1} ({tuple(block.shape)}) holds NaN or infinity",
                "train the links again with a lower optim.lr, or load whole ones",
            )
        if block.shape[0]:
            segments.append(Embeddings(block, block.shape[0], block.shape[1]))
        segments.append(tuple(ids))
    return Prompt(tuple(s for s in segments if not isinstance(s, tuple) or s))


@torch.no_grad()
def latent_rollout(
    backbone: Backbone, prompts: Sequence[Prompt], link: LinkFn, steps: int, *, memory: PromptMemory | None = None
) -> Rollout:
    """m cached latent steps for every prompt, without gradients.

    `memory` keeps the leading text of the same questions between rounds, so that it is computed once (not for models
    with linear attention, whose states cannot be cut back to it). Raises
    `ConfigError` for a prompt that is empty or does not fit the window, `RunFailedError` for a state that is not
    finite.
    """
    lengths = _check(backbone, prompts, steps)
    if steps == 0:
        return _finish(backbone, _no_states(backbone, len(prompts)), lengths, (0,) * len(prompts))
    if LINEAR in backbone.layer_kinds:
        memory = None
    kept = None if memory is None else memory.recall(prompts, backbone.device)
    if kept is not None and kept.gaps_break(backbone.sliding_window, lengths, steps):
        kept = None
    reused = (0,) * len(prompts) if kept is None else kept.reused
    embeds_BRD, mask_BL = pad_prompts(backbone, prompts, reused)
    if kept is not None:
        mask_BL = torch.cat([kept.mask_BK, mask_BL], dim=1)
    width = mask_BL.shape[1]
    cache = LatentCache(backbone.layer_kinds, 0) if kept is None else kept.cache
    cache.cut(0 if kept is None else kept.mask_BK.shape[1], width + steps - 1)
    cached = {"past_key_values": cache, "prefix_cache": cache, "use_cache": True}
    states_BmD = _unroll(backbone, embeds_BRD, mask_BL, link, steps, cached, "full")
    if memory is not None:
        memory.keep(cache, prompts, [width - length for length in lengths], kept)
    return _finish(backbone, states_BmD, lengths, reused)


def latent_rollout_with_grad(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    link: LinkFn,
    steps: int,
    *,
    gradient: Gradient = "full",
    checkpointed: bool = True,
    leads: LeadMemory | None = None,
) -> Rollout:
    """The same rollout with gradients to the link and to the prompts' blocks.

    `gradient`: "full" through every latent step; "first" through the first state only (the later ones are detached).
    With `checkpointed` only the prompt's embeddings are kept until the backward pass, which recomputes the whole
    rollout on a fresh cache. With `leads` the ids before the first block are computed without a graph, those that all
    rows share only once; states and gradients are the same. Raises as `latent_rollout`.
    """
    lengths = _check(backbone, prompts, steps)
    none = (0,) * len(prompts)
    if steps == 0:
        return _finish(backbone, _no_states(backbone, len(prompts)), lengths, none)
    lead = leads_of(backbone, prompts, leads, steps)
    embeds_BRD, mask_BL = pad_prompts(backbone, prompts, lead.skip)
    mask_BL = torch.cat([lead.mask_BC, mask_BL], dim=1)

    def run(inputs_BRD: Tensor) -> Tensor:
        cache = lead.open()
        cached = {"past_key_values": cache, "step_cache": cache, "use_cache": True}
        with step_attention(backbone.decoder):
            return _unroll(backbone, inputs_BRD, mask_BL, link, steps, cached, gradient)

    if checkpointed:
        states_BmD = checkpoint(run, embeds_BRD, use_reentrant=False, preserve_rng_state=False)
    else:
        states_BmD = run(embeds_BRD)
    return _finish(backbone, states_BmD, lengths, (lead.shared,) * len(prompts))


@torch.no_grad()
def latent_rollout_without_cache(backbone: Backbone, prompts: Sequence[Prompt], link: LinkFn, steps: int) -> Rollout:
    """The published form, which re-runs the whole prefix at each step: the reference for tests and benchmarks."""
    lengths = _check(backbone, prompts, steps)
    embeds_BLD, mask_BL = pad_prompts(backbone, prompts)
    states: list[Tensor] = []
    for step in range(steps):
        if step:
            embeds_BLD = torch.cat([embeds_BLD, link(states[-1]).to(backbone.dtype)[:, None]], dim=1)
            mask_BL = _longer(mask_BL)
        out = backbone.decoder(
            inputs_embeds=embeds_BLD, attention_mask=mask_BL, position_ids=positions_of(mask_BL), use_cache=False
        )
        states.append(out.last_hidden_state[:, -1])
    states_BmD = torch.stack(states, dim=1) if states else _no_states(backbone, len(prompts))
    computed = tuple(steps * length + steps * (steps - 1) // 2 for length in lengths)
    return Rollout(states_BmD, states_BmD.float().norm(dim=-1), tuple(lengths), (0,) * len(lengths), computed)


def _unroll(
    backbone: Backbone,
    embeds_BRD: Tensor,
    mask_BL: Tensor,
    link: LinkFn,
    steps: int,
    cached: dict[str, object],
    gradient: Gradient,
) -> Tensor:
    """The states (B, m, D). `mask_BL` covers what the cache holds already and the new embeddings."""
    new = embeds_BRD.shape[1]
    positions_BL = positions_of(mask_BL)
    out = backbone.decoder(
        inputs_embeds=embeds_BRD, attention_mask=mask_BL, position_ids=positions_BL[:, -new:], **cached
    )
    states = [out.last_hidden_state[:, -1]]
    next_B1 = positions_BL[:, -1:]
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient == "full"):
        for _ in range(steps - 1):
            mask_BL, next_B1 = _longer(mask_BL), next_B1 + 1
            embed_B1D = link(states[-1]).to(backbone.dtype)[:, None]
            out = backbone.decoder(inputs_embeds=embed_B1D, attention_mask=mask_BL, position_ids=next_B1, **cached)
            states.append(out.last_hidden_state[:, -1])
    return torch.stack(states, dim=1)


def _longer(mask_BL: Tensor) -> Tensor:
    return torch.cat([mask_BL, mask_BL.new_ones(mask_BL.shape[0], 1)], dim=1)


def _no_states(backbone: Backbone, rows: int) -> Tensor:
    return torch.zeros(rows, 0, backbone.dim, dtype=backbone.dtype, device=backbone.device)


def _check(backbone: Backbone, prompts: Sequence[Prompt], steps: int) -> list[int]:
    if steps < 0:
        raise ConfigError(f"latent_steps is {steps}", "set it to 0 or more")
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths, default=0) == 0:
        raise ConfigError(f"model {backbone.name!r} got an empty prompt", "give the agent a prompt")
    backbone.check_fits(max(lengths), max(steps - 1, 0), "latent steps fed back")
    return lengths


def _finish(backbone: Backbone, states_BmD: Tensor, lengths: Sequence[int], reused: Sequence[int]) -> Rollout:
    norms_Bm = states_BmD.detach().float().norm(dim=-1)
    bad = (~torch.isfinite(norms_Bm)).nonzero()
    if len(bad):
        row, step = bad[0].tolist()
        raise RunFailedError(
            f"model {backbone.name!r}: the hidden state of row {row + 1} at latent step {step + 1} of "
            f"{states_BmD.shape[1]} is not finite",
            "the links have diverged: load an earlier checkpoint, or train with a lower optim.lr",
        )
    steps = states_BmD.shape[1]
    computed = tuple(n - r + steps - 1 if steps else 0 for n, r in zip(lengths, reused, strict=True))
    return Rollout(states_BmD, norms_Bm, tuple(lengths), tuple(reused), computed)
