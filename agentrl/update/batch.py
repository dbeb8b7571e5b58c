"""Credited samples -> packed rows.

A row is one forward pass. Three layouts give the same numbers (`agentrl.update.probe` proves it for a model before
one is used):

- `tree`: the samples of a row share their common prefixes. The row is a trie laid flat; a token attends to its
  ancestors only, through a dense mask, and its position is its depth. Rollouts of one question share their prompt
  and often their first call, so most tokens are computed once.
- `packed`: samples lie one after another, positions restart at 0 and no mask is given, from which transformers
  builds the block-diagonal mask (or a variable-length kernel does).
- `padded`: one sample per line, right padded, for models that neither of the others fits.

Shapes: B lines and T tokens of a row, U places that are predicted from, N trained tokens, W packed words of an
allowed set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from agentrl.types import CreditedSample, Sample, ScoredSample
from agentrl.update.logprobs import Places

Layout = Literal["tree", "packed", "padded"]
AllowedSets = Callable[[ScoredSample], dict[int, np.ndarray]]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One row, or one padded rectangle, of samples of one part.

    `ids_BT`, `positions_BT` int64; `mask` is what the model gets as attention mask (None, (B,T) bool, or bool
    (1,1,T,T) for a tree). The per-token fields list every trained token of every sample, so a tree node that two
    samples train stands twice; `places` holds what predicts them, which such tokens share (its cells are b*T + t).
    `sample_N` and `token_N` say whose token it is. `old_N` is NaN where the update's own forward decides,
    `reference_N` where no reference was asked. Of the `num_cells` computed, `num_filled` hold a token and no padding;
    the samples have `num_tokens`, more where they share prefixes.
    """

    part: str
    ids_BT: Tensor
    positions_BT: Tensor
    mask: Tensor | None
    places: Places
    advantages_N: Tensor
    weights_N: Tensor
    old_N: Tensor
    reference_N: Tensor
    behaviour_N: Tensor
    constrained_N: Tensor
    sample_N: tuple[int, ...]
    token_N: tuple[int, ...]
    num_tokens: int
    num_filled: int
    num_cells: int

    @property
    def num_trained(self) -> int:
        return len(self.sample_N)


@dataclass(frozen=True, slots=True)
class _Tree:
    """Token sequences as a flat trie: `node[i][t]` is the flat index of token t of sequence i."""

    ids: list[int]
    parents: list[int]
    depths: list[int]
    nodes: list[list[int]]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin alike with."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _grow(sequences: Sequence[Sequence[int]], share: bool) -> _Tree:
    """Lay sequences (sorted, so that neighbours share most) as a trie; without `share`, side by side."""
    tree = _Tree([], [], [], [])
    for sequence in sequences:
        path: list[int] = []
        if share and tree.nodes:
            previous = tree.nodes[-1]
            keep = common_length(sequence, [tree.ids[n] for n in previous])
            path = previous[:keep]
        for depth in range(len(path), len(sequence)):
            tree.ids.append(sequence[depth])
            tree.parents.append(path[-1] if path else -1)
            tree.depths.append(depth)
            path.append(len(tree.ids) - 1)
        tree.nodes.append(path)
    return tree


def _ancestors(parents: Sequence[int]) -> Tensor:
    """(T,T) bool: row t sees itself and its ancestors."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for t, parent in enumerate(parents):
        if parent >= 0:
            mask[t] = mask[parent]
        mask[t, t] = True
    return torch.from_numpy(mask)


def _rows(credited: Sequence[CreditedSample], order: Sequence[int], capacity: int, layout: Layout) -> list[list[int]]:
    """Which samples go into which row: next-fit in an order where neighbours share most. Longer ones stand alone."""
    rows: list[list[int]] = []
    used, last = 0, tuple[int, ...]()
    for i in order:
        ids = credited[i].sample.ids
        longest = max((len(credited[j].sample.ids) for j in rows[-1]), default=0) if rows else 0
        if layout == "padded" and rows:
            fits = max(longest, len(ids)) * (len(rows[-1]) + 1) <= capacity
            cost = 0
        else:
            cost = len(ids) - (common_length(ids, last) if layout == "tree" else 0)
            fits = bool(rows) and used + cost <= capacity
        if fits:
            rows[-1].append(i)
            used += cost
        else:
            rows.append([i])
            used = len(ids)
        last = ids
    return rows


def packing_order(samples: Sequence[Sample], indices: Sequence[int], layout: Layout) -> list[int]:
    """The order in which samples go into rows: neighbours share most (tree), or are of like length."""
    if layout == "tree":
        return sorted(indices, key=lambda i: (samples[i].ids, samples[i].id))
    return sorted(indices, key=lambda i: (-len(samples[i].ids), samples[i].id))


def pack(
    credited: Sequence[CreditedSample],
    *,
    capacity: int,
    layout: Layout,
    allowed_sets: AllowedSets | None = None,
    device: torch.device | str = "cpu",
) -> list[TrainBatch]:
    """Rows of at most `capacity` computed tokens (a longer sample has a row of its own), parts never mixed.

    `allowed_sets(scored)` returns the packed allowed set (W,) int32 of each token that is trained under one; None
    trains every token under the full vocabulary. Samples without a trained token are left out. Rows do not depend on
    the order of `credited`.
    """
    batches = []
    samples = [c.sample for c in credited]
    for part in sorted({s.part for s in samples}):
        mine = [i for i, s in enumerate(samples) if s.part == part and s.num_trained]
        for row in _rows(credited, packing_order(samples, mine, layout), capacity, layout):
            batches.append(_batch(credited, row, part, layout, allowed_sets, device))
    return batches


def _batch(
    credited: Sequence[CreditedSample],
    row: list[int],
    part: str,
    layout: Layout,
    allowed_sets: AllowedSets | None,
    device: torch.device | str,
) -> TrainBatch:
    sequences = [credited[i].sample.ids for i in row]
    mask: Tensor | None = None
    if layout == "padded":
        width = max(map(len, sequences))
        ids_BT = torch.zeros(len(row), width, dtype=torch.long)
        mask = torch.zeros(len(row), width, dtype=torch.bool)
        for b, sequence in enumerate(sequences):
            ids_BT[b, : len(sequence)] = torch.tensor(sequence)
            mask[b, : len(sequence)] = True
        positions_BT = torch.arange(width).expand(len(row), width).contiguous()
        nodes = [[b * width + t for t in range(len(s))] for b, s in enumerate(sequences)]
    else:
        tree = _grow(sequences, share=layout == "tree")
        ids_BT = torch.tensor([tree.ids])
        positions_BT = torch.tensor([tree.depths])
        nodes = tree.nodes
        if layout == "tree" and len(row) > 1:
            mask = _ancestors(tree.parents)[None, None]
    tokens = _Tokens()
    for i, path in zip(row, nodes, strict=True):
        tokens.add(credited[i], i, path, {} if allowed_sets is None else allowed_sets(credited[i].scored))
    return TrainBatch(
        part=part,
        ids_BT=ids_BT.to(device),
        positions_BT=positions_BT.to(device),
        mask=None if mask is None else mask.to(device),
        places=tokens.places(device),
        sample_N=tuple(tokens.sample),
        token_N=tuple(tokens.token),
        num_tokens=sum(map(len, sequences)),
        num_filled=len({node for path in nodes for node in path}),
        num_cells=ids_BT.numel(),
        **{f"{name}_N": torch.tensor(values, device=device) for name, values in tokens.values.items()},
    )


class _Tokens:
    """The trained tokens of a row, in the order of its samples, and the places that predict them, each once."""

    def __init__(self) -> None:
        self.sample: list[int] = []
        self.token: list[int] = []
        self.target: list[int] = []
        self.place: list[int] = []
        self.values: dict[str, list[float] | list[bool]] = {
            name: [] for name in ("advantages", "weights", "old", "reference", "behaviour", "constrained")
        }
        self._places: dict[tuple[int, float, bytes], int] = {}
        self._allowed: list[np.ndarray | None] = []

    def add(self, credited: CreditedSample, index: int, path: Sequence[int], sets: dict[int, np.ndarray]) -> None:
        """Add a sample's trained tokens; `path[t]` is the cell of its token t."""
        scored, sample = credited.scored, credited.sample
        temperatures = {t: s.temperature for s in sample.spans for t in range(s.start, s.stop)}
        nothing = (math.nan,) * len(sample.ids)
        rows = zip(
            credited.advantages,
            credited.weights,
            nothing if scored.old is None else scored.old,
            nothing if scored.reference is None else scored.reference,
            sample.behaviour,
            sample.constrained,
            strict=True,
        )
        for t, row in enumerate(rows):
            if sample.reasons[t] is not None:
                continue
            assert t > 0, "the first token of a context cannot be sampled"
            self.sample.append(index)
            self.token.append(t)
            self.target.append(sample.ids[t])
            self.place.append(self._place(path[t - 1], temperatures[t], sets.get(t)))
            for values, value in zip(self.values.values(), row, strict=True):
                values.append(value)

    def _place(self, cell: int, temperature: float, allowed: np.ndarray | None) -> int:
        key = (cell, temperature, b"" if allowed is None else allowed.tobytes())
        if key not in self._places:
            self._places[key] = len(self._places)
            self._allowed.append(allowed)
        return self._places[key]

    def places(self, device: torch.device | str) -> Places:
        cells, temperatures, _ = zip(*self._places, strict=True)
        allowed = _stack(self._allowed)
        return Places(
            hidden_U=torch.tensor(cells, device=device),
            temperature_U=torch.tensor(temperatures, device=device, dtype=torch.float32),
            allowed_UW=None if allowed is None else torch.from_numpy(allowed).to(device),
            place_N=torch.tensor(self.place, device=device),
            target_N=torch.tensor(self.target, device=device),
        )


def _stack(allowed: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Rows of packed sets, all ones where a place is free; None when all are."""
    words = next((len(bits) for bits in allowed if bits is not None), None)
    if words is None:
        return None
    free = np.full(words, -1, dtype=np.int32)
    return np.stack([free if bits is None else bits for bits in allowed])
