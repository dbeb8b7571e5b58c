"""One model that gives token log-probabilities for packed batches: the trained policy's view, and a reference's.

Shapes: B rows, T tokens, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.grammar import GrammarFactory
from agentrl.models.lora import AdaptedModel
from agentrl.types import CreditedSample, Grammar, Sample, ScoredSample
from agentrl.update.batch import Layout, TrainBatch, pack
from agentrl.update.logprobs import Head, TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def head_of(model: PreTrainedModel, sink_VD: Tensor | None = None) -> Head:
    """The head of a causal model (`Head` says what the sink is). Raises `ConfigError` for one without a linear head."""
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output head", "use a causal language model")
    config = model.config.get_text_config().to_dict()
    scale = 1.0
    if config.get("logits_scaling"):
        scale = 1.0 / float(config["logits_scaling"])
    elif config.get("logit_scale"):
        scale = float(config["logit_scale"])
    softcap = config.get("final_logit_softcapping")
    return Head(output.weight, output.bias, scale, None if softcap is None else float(softcap), sink_VD)


def model_mask(model: PreTrainedModel, batch: TrainBatch) -> Tensor | dict[str, Tensor] | None:
    """The batch's mask in the form the model wants; models with sliding windows get one mask per layer type."""
    if batch.mask is None or batch.mask.dim() == 2:
        return batch.mask
    config = model.config.get_text_config()
    kinds = set(config.to_dict().get("layer_types") or ())
    if kinds <= {"full_attention"}:
        return batch.mask
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layers of kind {sorted(kinds)} cannot take a tree mask", "set optim.share_prefix: false")
    positions_T = batch.positions_BT[0]
    near_TT = positions_T[:, None] - positions_T[None, :] < int(config.sliding_window)
    return {"full_attention": batch.mask, "sliding_attention": batch.mask & near_TT}


class Scorer:
    """A causal model, how its rows are laid out, and the grammar sets its constrained tokens are scored under.

    Of a model that others share (`adapted`) it uses one `adapter`, or none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: Layout,
        capacity: int,
        chunk: int,
        grammar: GrammarFactory | None,
        train_under_grammar: bool,
        head_sink: Tensor | None = None,
        adapted: AdaptedModel | None = None,
        adapter: str | None = None,
    ) -> None:
        self.model = model
        self.head = head_of(model, head_sink)
        self.layout = layout
        self.capacity = capacity
        self.chunk = chunk
        self._grammar = grammar
        self._train_under_grammar = train_under_grammar
        self._adapted, self._adapter = adapted, adapter

    @classmethod
    def for_folder(cls, model: PreTrainedModel, folder: Path, **options: object) -> Scorer:
        return cls(model, grammar=GrammarFactory.from_folder(folder), **options)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.head.weight_VD.device

    def pack(self, credited: Sequence[CreditedSample]) -> list[TrainBatch]:
        """Rows of this model's layout, with the allowed set of every token trained under one."""
        sets = self._allowed_sets if self._train_under_grammar else None
        return pack(credited, capacity=self.capacity, layout=self.layout, allowed_sets=sets, device=self.device)

    def logprobs(self, batch: TrainBatch) -> TokenLogprobs:
        """Log-probabilities of the batch's N trained tokens, with gradient where autograd is on.

        On a shared model, a call without gradient leaves the adapter in use as it was: a backward pass that is still to
        come may compute its layers again.
        """
        if self._adapted is None:
            return self._logprobs(batch)
        before = self._adapted.active
        self._adapted.use(self._adapter)
        try:
            return self._logprobs(batch)
        finally:
            if not torch.is_grad_enabled():
                self._adapted.use(before)

    def _logprobs(self, batch: TrainBatch) -> TokenLogprobs:
        output = self.model.base_model(
            input_ids=batch.ids_BT,
            position_ids=batch.positions_BT,
            attention_mask=model_mask(self.model, batch),
            use_cache=False,
        )
        return token_logprobs(self.head, output.last_hidden_state.flatten(0, 1), batch.places, chunk=self.chunk)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Mapping[int, float]]:
        """Per sample, token index -> log-probability at the sampling temperature, for its trained tokens."""
        blank = [_uncredited(s) for s in samples]
        out: list[dict[int, float]] = [{} for _ in samples]
        for batch in self.pack(blank):
            values = self.logprobs(batch).current_N.tolist()
            for sample, token, value in zip(batch.sample_N, batch.token_N, values, strict=True):
                out[sample][token] = value
        return [*out]

    def _allowed_sets(self, scored: ScoredSample) -> dict[int, np.ndarray]:
        sample, out = scored.sample, {}
        for span in sample.spans:
            if span.grammar is not None:
                out.update(self._replay(sample, span.start, span.stop, span.grammar))
        return out

    def _replay(self, sample: Sample, start: int, stop: int, grammar: Grammar) -> dict[int, np.ndarray]:
        assert self._grammar is not None, "a sample with a grammar needs the policy's tokenizer"
        replay = self._grammar.replay(grammar, sample.ids[start:stop])
        return {
            start + t: replay.bitmask_TW[t]
            for t in range(stop - start)
            if sample.reasons[start + t] is None and replay.constrained_T[t]
        }


def _uncredited(sample: Sample) -> CreditedSample:
    zeros = (0.0,) * len(sample.ids)
    return CreditedSample(ScoredSample(sample), zeros, zeros)
