"""Does a layout give what each sample gives alone? Asked once per policy, of a small model of the same architecture.

Masks are a matter of the architecture, not of the weights, so the question is put to a random model of the same
configuration with a few layers (one of each kind at least), a small vocabulary and fp32 arithmetic, where the answer
is exact: a leak across samples shows as a difference far above rounding.
"""

from __future__ import annotations

import copy
import math
import random
from typing import TYPE_CHECKING

import torch

from agentrl.errors import ConfigError
from agentrl.types import MaskReason, Sample, Score, Span
from agentrl.update.batch import Layout
from agentrl.update.logprobs import Places, token_logprobs
from agentrl.update.scorer import Scorer, head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARITY = 1e-5
HEAD_GAP = 1e-3
_VOCAB = 160
_WINDOW = 6  # shorter than the samples, so that a layout that forgets the window shows


def choose_layout(model: PreTrainedModel, *, share_prefix: bool) -> tuple[Layout, dict[str, float]]:
    """The first layout that agrees with the plain forward within 1e-5, and each tried layout's gap.

    Tries tree (if `share_prefix`), packed, padded. Raises `ConfigError` when not even padding agrees.
    """
    small = miniature(model)
    gaps: dict[str, float] = {}
    order: list[Layout] = ["tree", "packed", "padded"] if share_prefix else ["packed", "padded"]
    for layout in order:
        gaps[layout] = parity_gap(small, layout)
        if gaps[layout] <= PARITY:
            return layout, gaps
    tried = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    raise ConfigError(
        f"{type(model).__name__}: packed samples do not score as they do alone ({tried})",
        "use a causal model without layers that carry state across samples",
    )


def miniature(model: PreTrainedModel) -> PreTrainedModel:
    """A random fp32 model of the same architecture: few layers, small vocabulary. Global random state is kept."""
    config = copy.deepcopy(model.config.get_text_config())
    kinds = config.to_dict().get("layer_types")
    layers = min(2, config.num_hidden_layers)
    if kinds:
        layers = max(layers, 1 + max(kinds.index(kind) for kind in set(kinds)))
        config.layer_types = list(kinds[:layers])
    config.num_hidden_layers = layers
    if config.to_dict().get("sliding_window"):
        config.sliding_window = _WINDOW
    config.vocab_size = _VOCAB
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(model)._from_config(config, attn_implementation=model.config._attn_implementation)
    placed: PreTrainedModel = small.float().eval().to(model.device)
    return placed


def parity_gap(model: PreTrainedModel, layout: Layout) -> float:
    """Largest difference between a row's log-probabilities and those of each sample alone; inf if the layout breaks."""
    samples = _samples(random.Random(0))
    scorer = Scorer(model, layout=layout, capacity=100_000, chunk=7, grammar=None, train_under_grammar=False)
    try:
        scored = scorer.score(samples)
    except (ConfigError, RuntimeError, ValueError, TypeError):
        return math.inf
    worst = 0.0
    with torch.no_grad():
        for sample, values in zip(samples, scored, strict=True):
            logits_TV = model(torch.tensor([sample.ids], device=model.device)).logits[0].float()
            logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
            for token, value in values.items():
                gap = abs(value - float(logprobs_TV[token - 1, sample.ids[token]]))
                if not math.isfinite(gap):
                    return math.inf  # a comparison with NaN is never true, so it would pass for small
                worst = max(worst, gap)
    return worst


@torch.no_grad()
def head_gap(model: PreTrainedModel) -> float:
    """Largest difference between our head and the model's own logits, as log-probabilities of a short sequence."""
    ids = torch.arange(1, 17, device=model.device)[None] % model.config.get_text_config().vocab_size
    hidden_TD = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    logits_TV = model(ids, use_cache=False).logits[0].float()
    target_T = ids[0].roll(-1)
    every_T = torch.arange(16, device=model.device)
    places = Places(every_T, torch.ones(16, device=model.device), None, every_T, target_T)
    ours_T = token_logprobs(head_of(model), hidden_TD, places).plain_N
    theirs_T = torch.log_softmax(logits_TV, dim=-1).gather(-1, target_T[:, None])[:, 0]
    return float((ours_T - theirs_T).abs().max())


def _samples(rng: random.Random) -> list[Sample]:
    """Samples with shared and unshared beginnings, a duplicate, and one that is a beginning of another."""

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(_VOCAB) for _ in range(n))

    stem = ids(9)
    long = stem + ids(11)
    sequences = [long, stem + ids(4), ids(13), long, long[:12], ids(3)]
    return [_sample(i, sequence) for i, sequence in enumerate(sequences)]


def _sample(index: int, ids: tuple[int, ...]) -> Sample:
    n = len(ids)
    return Sample(
        id=f"probe-{index}",
        trajectory_id="probe",
        group="probe",
        agent="probe",
        part="probe",
        policy="probe",
        policy_version=0,
        ids=ids,
        reasons=(MaskReason.PROMPT,) + (None,) * (n - 1),
        behaviour=(0.0,) * n,
        constrained=(False,) * n,
        spans=(Span(1, n, 0, 1.0),),
        score=Score(0.0),
    )
