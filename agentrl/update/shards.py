"""Which trainer rank computes which samples: even shares of the packed tokens, neighbours kept together."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import Sample
from agentrl.update.batch import Layout, common_length, packing_order


def split(samples: Sequence[Sample], num_ranks: int, layout: Layout) -> list[list[int]]:
    """Indices of the samples of each rank, in their own order. Every sample with a trained token is in one share, and
    a share may be empty.

    Each part is cut by itself along its packing order, at equal sums of computed tokens, so that prefixes which samples
    share are computed by one rank where that is even. The gradient is a sum over tokens whose weights are set before,
    so the cuts cannot change it.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for part in sorted({sample.part for sample in samples}):
        order = packing_order(samples, [i for i, s in enumerate(samples) if s.part == part and s.num_trained], layout)
        costs = [len(samples[i].ids) for i in order]
        if layout == "tree":
            for k in range(1, len(order)):
                costs[k] -= common_length(samples[order[k - 1]].ids, samples[order[k]].ids)
        done, whole = 0.0, max(1, sum(costs))
        for i, cost in zip(order, costs, strict=True):
            middle = done + cost / 2
            shares[min(num_ranks - 1, int(num_ranks * middle / whole))].append(i)
            done += cost
    return [sorted(share) for share in shares]
