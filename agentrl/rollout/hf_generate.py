"""Batch generation with transformers models: left padding, one shared prefix, a growing key-value cache.

A batch holds rows of one policy. Their longest common prefix is computed and kept once (`hf_attention`); what is left
of each prompt follows left-padded, so every row's next token stands in the last column. Positions come from the mask,
hence padding changes nothing. Rows that finish leave the batch once a quarter of it is done.

Shapes: B rows, P shared prefix, S longest rest, V vocabulary, W packed words of a bitmask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agentrl.errors import EngineError
from agentrl.grammar import GrammarFactory, GrammarMatcher
from agentrl.rollout.hf_attention import LINEAR, PrefixCache, layer_kinds
from agentrl.rollout.hf_sampling import RowParams, sample, unpack_bitmask
from agentrl.rollout.latent_cache import LatentCache, PromptMemory
from agentrl.types import Completion, Embeddings, Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

_MIN_SHARED = 16  # tokens of common prefix worth a pass of its own
_COMPACT_SHARE = 0.25  # finished rows leave when they are this share of the batch


@dataclass(frozen=True, slots=True)
class HFPolicy:
    """A policy that the hf engine samples from.

    `eos_ids` end every completion. `grammar` compiles grammars; none builds one from the tokenizer and `eos_ids`.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    pad_id: int
    grammar: GrammarFactory | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])


@dataclass(slots=True)
class Row:
    """One request while it is generated. `uniforms` holds one number in [0, 1) per token it may sample. Before
    `min_tokens` no stop token is sampled. The first `lead` ids of its prompt may come again in a later batch (see
    `prefill_with`); `reused` prompt positions were not computed for this row."""

    request: Request
    max_tokens: int
    uniforms: list[float]
    stop_ids: frozenset[int]
    matcher: GrammarMatcher | None = None
    min_tokens: int = 0
    lead: int = 0
    reused: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    constrained: list[bool] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.ids) >= self.max_tokens

    @property
    def computed(self) -> int:
        """Positions that went through the model: the last sampled token is not fed back."""
        return len(self.request.prompt) - self.reused + len(self.ids) - 1

    def take(self, token: int, logprob: float, num_allowed: int, policy: HFPolicy) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.constrained.append(num_allowed < policy.vocab_size)
        self.forced.append(num_allowed == 1)
        if token in self.stop_ids:
            self.stopped = True
            return
        if self.matcher is not None:
            self.matcher.accept(token)
        stops = self.request.sampling.stop
        if stops:
            # Every token decodes to a byte or more and a character has at most four, so the end is enough.
            tail = self.ids[-(4 * max(map(len, stops)) + 4) :]
            text = policy.tokenizer.decode(tail, skip_special_tokens=False)
            self.stopped = any(stop in text for stop in stops)

    def completion(self, version: int) -> Completion:
        return Completion(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            constrained=tuple(self.constrained),
            forced=tuple(self.forced),
            finish_reason="stop" if self.stopped else "length",
            policy_version=version,
        )


@dataclass(slots=True)
class Batch:
    """The running state: who is still in the batch, the cache, the mask over it, the next logits."""

    rows: list[Row]
    cache: PrefixCache
    mask_BL: torch.Tensor
    positions_B: torch.Tensor
    logits_BV: torch.Tensor
    params: RowParams


@torch.inference_mode()
def generate_batch(
    policy: HFPolicy,
    rows: Sequence[Row],
    version: int,
    *,
    share_limit: int,
    closing: Callable[[], bool] = lambda: False,
    memory: PromptMemory | None = None,
) -> list[Completion]:
    """Complete all rows; results in row order. A common prefix is computed once when the batch, padding and all, is
    no longer than `share_limit` tokens. `memory` instead keeps what each row's prompt begins with for the next batch
    of the same rows. Raises `EngineError` on NaN logits, and at the next token once `closing()`."""
    if memory is None or LINEAR in layer_kinds(policy.model.config.get_text_config()):
        batch = prefill(policy, list(rows), share_limit=share_limit)
    else:
        batch = prefill_with(memory, policy, list(rows))
    while True:
        tokens_B = _step(policy, batch)
        if all(row.done for row in batch.rows):
            return [row.completion(version) for row in rows]
        if closing():
            raise EngineError("the engine was closed while it generated", "end the rollouts before closing it")
        tokens_B = _compact(batch, tokens_B)
        _forward(policy, batch, tokens_B)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """The number of leading ids that all prompts share, leaving at least one id of each."""
    first, last = min(prompts, key=tuple), max(prompts, key=tuple)
    limit = min(map(len, prompts)) - 1
    same = 0
    while same < limit and first[same] == last[same]:
        same += 1
    return same


def prefill(policy: HFPolicy, rows: list[Row], *, share_limit: int) -> Batch:
    model, device = policy.model, policy.model.device
    plain = all(isinstance(segment, tuple) for row in rows for segment in row.request.prompt.segments)
    shared = 0
    kinds = layer_kinds(model.config.get_text_config())
    max_new = max(row.max_tokens for row in rows)
    if plain:
        prompts = [row.request.prompt.ids for row in rows]
        width = max(map(len, prompts)) + max_new
        shared = common_prefix(prompts) if len(rows) > 1 and width <= share_limit else 0
        shared = shared if shared >= _MIN_SHARED else 0
        rests = [prompt[shared:] for prompt in prompts]
        lengths = [len(rest) for rest in rests]
        longest = max(lengths)
        cache = PrefixCache(kinds, longest + max_new)
        if shared:
            prefix_1P = torch.tensor([prompts[0][:shared]], device=device)
            model(input_ids=prefix_1P, **_cached(cache))
            cache.share()
        ids_BS = torch.tensor([[policy.pad_id] * (longest - len(r)) + list(r) for r in rests], device=device)
        inputs = {"input_ids": ids_BS}
    else:
        blocks = [_embed(policy, row.request) for row in rows]
        lengths = [block.shape[0] for block in blocks]
        longest = max(lengths)
        cache = PrefixCache(kinds, longest + max_new)
        inputs = {"inputs_embeds": torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True, padding_side="left")}
    mask_BL = torch.ones(len(rows), shared + longest, dtype=torch.long, device=device)
    for b, length in enumerate(lengths):
        mask_BL[b, shared : shared + longest - length] = 0
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp_(min=0)
    out = model(
        **inputs,
        attention_mask=mask_BL,
        position_ids=positions_BL[:, shared:],
        **_cached(cache),
    )
    for row in rows[1:]:
        row.reused = shared
    params = RowParams.of([row.request.sampling for row in rows], device)
    return Batch(rows, cache, mask_BL, positions_BL[:, -1], out.logits[:, -1].float(), params)


def prefill_with(memory: PromptMemory, policy: HFPolicy, rows: list[Row]) -> Batch:
    """The same on what `memory` keeps of these rows' last prompts, as latent rollouts do; prompts are plain ids."""
    model, device = policy.model, policy.model.device
    config = model.config.get_text_config()
    prompts = [row.request.prompt for row in rows]
    lengths, max_new = [len(prompt) for prompt in prompts], max(row.max_tokens for row in rows)
    leads = [row.request.prompt.ids[: row.lead] for row in rows]
    kept = memory.recall(prompts, device, leads)
    if kept is not None and kept.gaps_break(config.to_dict().get("sliding_window"), lengths, max_new):
        kept = None
    if kept is not None:
        for row, reused in zip(rows, kept.reused, strict=True):
            row.reused = reused
    rests = [row.request.prompt.ids[row.reused :] for row in rows]
    longest = max(map(len, rests))
    ids_BS = torch.tensor([[policy.pad_id] * (longest - len(r)) + list(r) for r in rests], device=device)
    mask_BL = torch.ones(len(rows), longest, dtype=torch.long, device=device)
    for b, rest in enumerate(rests):
        mask_BL[b, : longest - len(rest)] = 0
    mask_BL = mask_BL if kept is None else torch.cat([kept.mask_BK, mask_BL], dim=1)
    width = mask_BL.shape[1]
    cache = LatentCache(layer_kinds(config), 0) if kept is None else kept.cache
    cache.cut(width - longest, width + max_new)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp_(min=0)
    out = model(input_ids=ids_BS, attention_mask=mask_BL, position_ids=positions_BL[:, -longest:], **_cached(cache))
    memory.keep(cache, prompts, [width - length for length in lengths], kept, leads)
    params = RowParams.of([row.request.sampling for row in rows], device)
    return Batch(rows, cache.running(), mask_BL, positions_BL[:, -1], out.logits[:, -1].float(), params)


def _cached(cache: PrefixCache) -> dict[str, Any]:
    return {"past_key_values": cache, "prefix_cache": cache, "use_cache": True, "logits_to_keep": 1}


def _embed(policy: HFPolicy, request: Request) -> torch.Tensor:
    """The prompt's input embeddings, shape (length, D)."""
    table = policy.model.get_input_embeddings()
    weight = table.weight
    assert isinstance(weight, torch.Tensor)
    parts = []
    for segment in request.prompt.segments:
        if isinstance(segment, Embeddings):
            handle = segment.handle
            if not isinstance(handle, torch.Tensor) or tuple(handle.shape) != (segment.length, weight.shape[1]):
                raise EngineError(
                    f"the embeddings of {request.key} are not a tensor of shape "
                    f"({segment.length}, {weight.shape[1]}), the width of policy {request.policy!r}",
                    "send embeddings made for this policy",
                )
            parts.append(handle.to(device=weight.device, dtype=weight.dtype))
        elif segment:
            parts.append(table(torch.tensor(segment, device=weight.device)))
    return torch.cat(parts)


def _step(policy: HFPolicy, batch: Batch) -> torch.Tensor:
    """Sample one token for every row (the pad id for finished ones). Returns ids of shape (B,)."""
    logits_BV, rows = batch.logits_BV, batch.rows
    num_allowed = [logits_BV.shape[1]] * len(rows)
    held = [(row.matcher, b) for b, row in enumerate(rows) if row.matcher is not None and not row.done]
    if held:
        assert policy.grammar is not None
        bitmask_GW = torch.zeros(len(held), policy.grammar.num_words, dtype=torch.int32)
        policy.grammar.fill([(matcher, g) for g, (matcher, _) in enumerate(held)], bitmask_GW.numpy())
        allowed_GV = unpack_bitmask(bitmask_GW, logits_BV.shape[1])
        counts_G = allowed_GV.sum(-1).tolist()
        places = [b for _, b in held]
        for b, count in zip(places, counts_G, strict=True):
            num_allowed[b] = count
        index_G = torch.tensor(places, device=logits_BV.device)
        logits_BV[index_G] = logits_BV[index_G].masked_fill(~allowed_GV.to(logits_BV.device), -torch.inf)
    for b, row in enumerate(rows):
        if len(row.ids) < row.min_tokens and not row.done and row.stop_ids:
            logits_BV[b, list(row.stop_ids)] = -torch.inf
            num_allowed[b] -= len(row.stop_ids)
    uniforms_B = torch.tensor([0.0 if row.done else row.uniforms[len(row.ids)] for row in rows])
    tokens_B, logprobs_B = sample(logits_BV, batch.params, uniforms_B.to(logits_BV.device))
    tokens, logprobs = tokens_B.tolist(), logprobs_B.tolist()
    for b, row in enumerate(rows):
        if row.done:
            tokens[b] = policy.pad_id
            continue
        if logprobs[b] != logprobs[b]:
            raise EngineError(
                f"policy {row.request.policy!r} produced NaN logits at token {len(row.ids)} of {row.request.key}",
                "the weights have diverged: resume from an earlier checkpoint with a lower optim.lr",
            )
        row.take(tokens[b], logprobs[b], num_allowed[b], policy)
    return torch.tensor(tokens, device=logits_BV.device)


def _compact(batch: Batch, tokens_B: torch.Tensor) -> torch.Tensor:
    """Drop finished rows once enough of them have gathered."""
    alive = [b for b, row in enumerate(batch.rows) if not row.done]
    if len(batch.rows) - len(alive) < max(1, _COMPACT_SHARE * len(batch.rows)):
        return tokens_B
    index_A = torch.tensor(alive, device=tokens_B.device)
    batch.rows = [batch.rows[b] for b in alive]
    batch.cache.batch_select_indices(index_A)
    batch.mask_BL = batch.mask_BL[index_A]
    batch.positions_B = batch.positions_B[index_A]
    batch.params = batch.params.select(index_A)
    return tokens_B[index_A]


def _forward(policy: HFPolicy, batch: Batch, tokens_B: torch.Tensor) -> None:
    batch.mask_BL = torch.cat([batch.mask_BL, batch.mask_BL.new_ones(len(batch.rows), 1)], dim=1)
    batch.positions_B = batch.positions_B + 1
    out = policy.model(
        input_ids=tokens_B[:, None],
        attention_mask=batch.mask_BL,
        position_ids=batch.positions_B[:, None],
        **_cached(batch.cache),
    )
    batch.logits_BV = out.logits[:, -1].float()
