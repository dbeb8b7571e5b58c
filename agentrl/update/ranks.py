"""The driver's hold on the trainer ranks of a run: what they are told, and what comes back.

With `launch.ranks: N` a run has N-1 trainer processes beside the driver, which is rank 0. Each holds a follower of
every trained policy and every reference, made as the driver makes its own. The flow of one step, for each policy:

    driver                                             ranks 1..N-1 (`agentrl.update.follower`)
    rollouts, samples, credit: weights and advantages
      are final, so no rank computes a count or a mean
    split: every sample in one share                   (`agentrl.update.shards`)
    UpdateOrder with its share, to each rank   ---->   rows, forward, loss, backward, into its fp32 accumulators
    the same for its own share
    accumulators of all ranks summed on rank 0 <===    gives its own and clears them
      (after each part where their gradients are told apart, else once)
    what was seen on the way, merged           <----   tally: sums and the old log-probabilities
    clip by the global norm, one AdamW step, version + 1
    WeightsOrder, new compute weights          ====>   takes them

The sum is a sum and no mean: weights are global. So N ranks give the gradient of one, but for the order of fp32
additions, and a rank without samples adds zeros. Only rank 0 has masters and moments: there is one step, one norm, one
checkpoint, and a resumed run may have another number of ranks. Scoring (old and reference log-probabilities) is split
the same way; its values come back through the pipes.

A policy whose weights are spread over ranks (ZeRO-3) would take the same orders, with a `step` that all ranks enter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.config.schema import AlgorithmConfig
from agentrl.launch.distributed import Group
from agentrl.types import CreditedSample, Sample
from agentrl.update.policy import Policy
from agentrl.update.scorer import Scorer
from agentrl.update.shards import split


@dataclass(frozen=True, slots=True)
class UpdateOrder:
    """Add the gradient of these samples, part by part in the order of `parts`. `per_part`: meet after each."""

    policy: str
    credited: tuple[CreditedSample, ...]
    algorithm: AlgorithmConfig
    parts: tuple[str, ...]
    per_part: bool


@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """Take the policy's weights from rank 0."""

    policy: str
    version: int


@dataclass(frozen=True, slots=True)
class ScoreOrder:
    """Give the log-probabilities of these samples, by the policy or by its reference."""

    policy: str
    reference: bool
    samples: tuple[Sample, ...]


class Ranks:
    """All trainer ranks of a run. `Ranks()` is the driver alone.

    `threads`: torch threads of the driver while all ranks compute; None leaves them as they are.
    """

    def __init__(self, group: Group | None = None, threads: int | None = None) -> None:
        self._group = group
        self._threads = threads

    @property
    def num(self) -> int:
        return 1 if self._group is None else self._group.num_ranks

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While all ranks compute: they share the cores that the driver has to itself elsewhere."""
        if self._group is None or self._threads is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def send(self, orders: Sequence[object]) -> None:
        """One order to each of ranks 1, 2, ..."""
        if self._group is not None:
            self._group.send(orders)

    def replies(self) -> list[Any]:
        """The answers of ranks 1, 2, ... Raises as `Group.meet`."""
        return [] if self._group is None else self._group.meet()

    def sum_gradients(self, policy: Policy) -> None:
        """Add the other ranks' gradients of an update that they were ordered to the policy's own."""
        if self._group is not None:
            self._group.add_to_first(policy.grads.values())

    def spread(self, policy: Policy) -> None:
        """Give every rank the policy's weights."""
        if self._group is not None:
            self._group.send([WeightsOrder(policy.name, policy.version)] * (self.num - 1))
            self._group.spread_first(policy.trained_weights().values())

    def score(
        self, policy: str, scorer: Scorer, samples: Sequence[Sample], *, reference: bool
    ) -> list[Mapping[int, float]]:
        """`scorer.score(samples)` by all ranks; `scorer` is the driver's own of this policy or, with `reference`, of
        its reference. Which rank scores a sample is the same for both where their layouts are."""
        shares = split(samples, self.num, scorer.layout)
        with self.computing():
            self.send([ScoreOrder(policy, reference, tuple(samples[i] for i in share)) for share in shares[1:]])
            values = [scorer.score([samples[i] for i in shares[0]]), *self.replies()]
        out: list[Mapping[int, float]] = [{} for _ in samples]
        for share, found in zip(shares, values, strict=True):
            for i, one in zip(share, found, strict=True):
                out[i] = one
        return out
