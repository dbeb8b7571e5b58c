"""One policy update: packed rows, forward, loss, backward, one optimiser step, and what was seen on the way.

The loss is -sum_t weight_t * surrogate_t (+ kl_coef * sum_t weight_t * KL_t). Nothing here knows a method, a group or
a count: those are in the advantages and weights, so rows, their order, their number and the rank that computes one
cannot change the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl.algo.kl import KlStats, kl_loss, kl_stats, mismatch_kl
from agentrl.algo.loss import policy_loss
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DivergedError
from agentrl.types import CreditedSample
from agentrl.update.batch import TrainBatch
from agentrl.update.logprobs import TokenLogprobs
from agentrl.update.parts import PartGradients
from agentrl.update.policy import Policy, StepStats
from agentrl.update.ranks import Ranks, UpdateOrder
from agentrl.update.scorer import Scorer
from agentrl.update.shards import split

GAP_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update did. `old` holds, per sample and token index, the trainer's log-probability before it.

    Of the metrics, `pack/fill` is the share of computed cells that hold a token, in (0, 1], and `pack/shared` the share
    of the samples' tokens, in [0, 1), that need no cell of their own because others of the row begin alike.
    """

    metrics: Mapping[str, float | None]
    stats: StepStats | None
    old: tuple[Mapping[int, float], ...]


@dataclass(slots=True)
class Tally:
    """Sums over the rows of one update, by one rank until they are merged."""

    old: list[dict[int, float]]
    loss: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    filled: int = 0
    cells: int = 0
    trained: int = 0
    mismatch: KlStats | None = None
    reference: KlStats | None = None

    def add(self, batch: TrainBatch, logprobs: TokenLogprobs) -> None:
        values = logprobs.current_N.detach().tolist()
        for sample, token, value in zip(batch.sample_N, batch.token_N, values, strict=True):
            self.old[sample][token] = value
        stats = mismatch_kl(batch.behaviour_N, logprobs.plain_N, ~batch.constrained_N)
        self.mismatch = _both(self.mismatch, stats)
        self.tokens += batch.num_tokens
        self.filled += batch.num_filled
        self.cells += batch.num_cells

    def merge(self, other: Tally, indices: Sequence[int]) -> None:
        """Add what another rank saw; its sample k is our sample `indices[k]`."""
        for index, old in zip(indices, other.old, strict=True):
            self.old[index] = old
        for mine, theirs in ((self.clipped, other.clipped), (self.active, other.active)):
            for part, count in theirs.items():
                mine[part] = mine.get(part, 0) + count
        for part, loss in other.loss.items():
            self.loss[part] = self.loss.get(part, 0.0) + loss
        self.tokens += other.tokens
        self.filled += other.filled
        self.cells += other.cells
        self.trained += other.trained
        self.mismatch = _both(self.mismatch, other.mismatch)
        self.reference = _both(self.reference, other.reference)


def _both(one: KlStats | None, other: KlStats | None) -> KlStats | None:
    if one is None or other is None:
        return other if one is None else one
    return one.merge(other)


def has_effect(credited: CreditedSample, kl_coef: float) -> bool:
    """Whether a sample can move the weights: with no KL, an advantage of 0 on every token gives gradient 0 exactly."""
    if kl_coef > 0:
        return any(w != 0 for w in credited.weights)
    return any(a != 0 and w != 0 for a, w in zip(credited.advantages, credited.weights, strict=True))


def update_policy(
    policy: Policy,
    credited: Sequence[CreditedSample],
    algorithm: AlgorithmConfig,
    *,
    reference: Scorer | None = None,
    part_stats: bool = False,
    ranks: Ranks | None = None,
) -> UpdateResult:
    """Take one optimiser step on all samples, computed by all `ranks` (None: the driver alone). Samples that cannot
    move the weights are not computed, but for a few that keep the engine's mismatch measured on every step.

    Raises `DivergedError` when the loss is not finite, naming the sample, and as `Policy.step` does.
    """
    ranks = ranks or Ranks()
    tally = Tally([{} for _ in credited])
    moving = [i for i, c in enumerate(credited) if has_effect(c, algorithm.kl_coef)]
    idle = sorted({i for i, c in enumerate(credited) if c.sample.num_trained} - set(moving))
    assert policy.trainable or not moving, f"policy {policy.name!r} is frozen, its tokens must be masked"
    policy.zero_grad()
    names = tuple(sorted({credited[i].sample.part for i in moving}))
    parts = PartGradients(policy.grads, names) if part_stats else None

    def meet(part: str | None) -> None:
        ranks.sum_gradients(policy)
        if parts is not None and part is not None:
            parts.close(part)

    if moving:
        shares = [
            [moving[k] for k in share]
            for share in split([credited[i].sample for i in moving], ranks.num, policy.layout)
        ]
        orders = [
            UpdateOrder(policy.name, tuple(credited[i] for i in share), algorithm, names, part_stats)
            for share in shares
        ]
        with ranks.computing():
            ranks.send(orders[1:])
            tallies = [add_gradients(policy, orders[0], reference, meet), *ranks.replies()]
        for share, found in zip(shares, tallies, strict=True):
            tally.merge(found, share)
    spare = idle[: max(0, GAP_SAMPLES - len(moving))]
    with torch.no_grad():
        for batch in policy.scorer.pack([credited[i] for i in spare]):
            tally.add(_renumber(batch, spare), policy.scorer.logprobs(batch))
    stats = policy.step() if moving else None
    if stats is not None and stats.applied:
        ranks.spread(policy)
    return UpdateResult(_metrics(tally, stats, len(moving), len(idle), parts), stats, tuple(tally.old))


def add_gradients(
    policy: Policy, order: UpdateOrder, reference: Scorer | None, meet: Callable[[str | None], None]
) -> Tally:
    """One rank's share of an update: its gradient added to the policy's accumulators, and what was seen on the way.

    `meet` is called, on all ranks alike, when the accumulators are to be summed over the ranks: after each part (with
    its name) if the order says so, else once at the end (None). Raises `DivergedError` when the loss is not finite.
    """
    credited = order.credited
    asked = reference if order.algorithm.kl_coef > 0 else None
    tally = Tally([{} for _ in credited])
    for part in order.parts:
        mine = [i for i, one in enumerate(credited) if one.sample.part == part]
        for batch in policy.scorer.pack([credited[i] for i in mine]):
            _backward(policy, _renumber(batch, mine), order.algorithm, asked, tally, credited)
        if order.per_part:
            meet(part)
    if not order.per_part:
        meet(None)
    return tally


def _backward(
    policy: Policy,
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    reference: Scorer | None,
    tally: Tally,
    credited: Sequence[CreditedSample],
) -> None:
    """Add one row's gradient. A reference scores the very row that the policy scores, so that the two are equal to the
    last bit while their weights are."""
    logprobs = policy.scorer.logprobs(batch)
    current_N = logprobs.current_N
    old_N = torch.where(batch.old_N.isnan(), current_N.detach(), batch.old_N)
    out = policy_loss(
        current_N,
        old_N,
        batch.advantages_N,
        batch.weights_N,
        eps_low=algorithm.clip_eps_low,
        eps_high=algorithm.clip_eps_high,
    )
    loss = out.loss
    reference_N = batch.reference_N
    if algorithm.kl_coef > 0:
        if reference is not None:
            with torch.no_grad():
                reference_N = torch.where(reference_N.isnan(), reference.logprobs(batch).current_N, reference_N)
        loss = loss + algorithm.kl_coef * kl_loss(current_N, reference_N, batch.weights_N, algorithm.kl_estimator)
        stats = kl_stats(current_N.detach() - reference_N, batch.weights_N != 0)
        tally.reference = _both(tally.reference, stats)
    value = float(loss.detach())
    if not math.isfinite(value):
        terms = {"current": current_N, "old": old_N, "advantage": batch.advantages_N, "weight": batch.weights_N}
        if algorithm.kl_coef > 0:
            terms["reference"] = reference_N
        raise _diverged(policy, value, batch, terms, credited)
    loss.backward()
    tally.add(batch, logprobs)
    tally.loss[batch.part] = tally.loss.get(batch.part, 0.0) + value
    tally.clipped[batch.part] = tally.clipped.get(batch.part, 0) + int(out.clipped_T.sum())
    tally.active[batch.part] = tally.active.get(batch.part, 0) + int(out.active_T.sum())
    tally.trained += batch.num_trained


def _diverged(
    policy: Policy, value: float, batch: TrainBatch, terms: Mapping[str, Tensor], credited: Sequence[CreditedSample]
) -> DivergedError:
    """Says where a loss that is not finite comes from: the first such value by sample and token, and weight."""
    where = ""
    for name, values_N in terms.items():
        values_N = values_N.detach()
        odd_N = (~torch.isfinite(values_N)).nonzero()
        if len(odd_N):
            n = int(odd_N[0])
            sample = credited[batch.sample_N[n]].sample.id
            where = f": the {name} value of token {batch.token_N[n]} of sample {sample!r} is {float(values_N[n])}"
            break
    weight = policy.broken_weight()
    if weight is not None:
        where += f", and weight {weight!r} is not finite"
    return DivergedError(
        f"policy {policy.name!r}: the loss is {value}{where}", "resume from the last checkpoint with a lower optim.lr"
    )


def _renumber(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    return replace(batch, sample_N=tuple(indices[i] for i in batch.sample_N))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _metrics(
    tally: Tally, stats: StepStats | None, moving: int, idle: int, parts: PartGradients | None
) -> dict[str, float | None]:
    gap = tally.mismatch if tally.mismatch is not None and tally.mismatch.count else None  # nothing measured is no 0
    out: dict[str, float | None] = {
        "loss": sum(tally.loss.values()),
        **{f"loss/{part}": value for part, value in tally.loss.items()},
        "grad_norm": None if stats is None else stats.grad_norm,
        "lr": None if stats is None else stats.lr,
        "clip_fraction": _share(sum(tally.clipped.values()), sum(tally.active.values())),
        **{f"clip_fraction/{part}": _share(tally.clipped[part], active) for part, active in tally.active.items()},
        "kl/ref": None if tally.reference is None else tally.reference.mean_kl,
        "kl/ref_max": None if tally.reference is None else tally.reference.max_kl,
        "kl/mismatch": None if gap is None else gap.mean_kl,
        "mismatch/mean_abs": None if gap is None else gap.mean_abs,
        "mismatch/max": None if gap is None else gap.max_kl,
        "mismatch/tokens": 0 if gap is None else gap.count,
        "tokens/trained": tally.trained,
        "tokens/computed": tally.cells,
        "pack/fill": tally.filled / tally.cells if tally.cells else None,
        "pack/shared": 1 - tally.filled / tally.tokens if tally.tokens else None,
        "samples/moving": moving,
        "samples/idle": idle,
        "steps/skipped": 0 if stats is None or stats.applied else 1,
    }
    if parts is not None:
        out.update({f"grad_norm/{part}": norm for part, norm in parts.norms.items()})
        if parts.cosine is not None:
            out["grad_cosine"] = parts.cosine
    return out
