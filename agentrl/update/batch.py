"""Credited samples -> packed rows.

A row is one forward pass. Three layouts give the same numbers (`agentrl.update.probe` proves it for a model before
one is used):

- `tree`: the samples of a row share their common prefixes. The row is a trie laid flat; a token attends to its
  ancestors only, through a dense mask, and its position is its depth. Rollouts of one question share their prompt
  and often their first call, so most tokens are computed once.
- `packed`: samples lie one after another, positions restart at 0 and no mask is given, from which transformers
  builds the block-diagonal mask (or a variable-length kernel does).
- `padded`: one sample per line, right padded, for models that neither of the others fits.

Shapes: T tokens of a row, N trained tokens of a row, W packed words of an allowed set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from agentrl.types import CreditedSample, MaskReason, ScoredSample

Layout = Literal["tree", "packed", "padded"]
AllowedSets = Callable[[ScoredSample], dict[int, np.ndarray]]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One row, or one padded rectangle, of samples of one part.

    `ids_BT`, `positions_BT` int64; `mask` is what the model gets as attention mask (None, (B,T) bool, or bool
    (1,1,T,T) for a tree). The per-token fields list every trained token of every sample, so a tree node that two
    samples train stands twice: `hidden_N` is the flat index (b*T + t) of the hidden state that predicts it,
    `target_N` its id, `sample_N` and `token_N` say whose token it is. `old_N` is NaN where the update's own forward
    decides. `allowed_NW` is None when no token of the batch is trained under a grammar's set.
    """

    part: str
    ids_BT: Tensor
    positions_BT: Tensor
    mask: Tensor | None
    hidden_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    old_N: Tensor
    reference_N: Tensor
    behaviour_N: Tensor
    constrained_N: Tensor
    allowed_NW: Tensor | None
    sample_N: tuple[int, ...]
    token_N: tuple[int, ...]
    num_tokens: int
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


def _common(a: Sequence[int], b: Sequence[int]) -> int:
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
            keep = _common(sequence, [tree.ids[n] for n in previous])
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
    used, last = 0, ()
    for i in order:
        ids = credited[i].sample.ids
        longest = max((len(credited[j].sample.ids) for j in rows[-1]), default=0) if rows else 0
        if layout == "padded" and rows:
            fits = max(longest, len(ids)) * (len(rows[-1]) + 1) <= capacity
            cost = 0
        else:
            cost = len(ids) - (_common(ids, last) if layout == "tree" else 0)
            fits = bool(rows) and used + cost <= capacity
        if fits:
            rows[-1].append(i)
            used += cost
        else:
            rows.append([i])
            used = len(ids)
        last = ids
    return rows


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
    trains every token under the full vocabulary. Samples without a trained token are left out.
    """
    batches = []
    parts = sorted({c.sample.part for c in credited})
    for part in parts:
        mine = [i for i, c in enumerate(credited) if c.sample.part == part and c.sample.num_trained]
        if layout == "tree":
            mine.sort(key=lambda i: (credited[i].sample.ids, i))
        else:
            mine.sort(key=lambda i: (-len(credited[i].sample.ids), i))
        for row in _rows(credited, mine, capacity, layout):
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
    fields = _trained_tokens(credited, row, nodes, allowed_sets)
    allowed = fields.pop("allowed")
    return TrainBatch(
        part=part,
        ids_BT=ids_BT.to(device),
        positions_BT=positions_BT.to(device),
        mask=None if mask is None else mask.to(device),
        allowed_NW=None if allowed is None else torch.from_numpy(allowed).to(device),
        num_tokens=sum(map(len, sequences)),
        num_cells=ids_BT.numel(),
        sample_N=tuple(fields.pop("sample")),
        token_N=tuple(fields.pop("token")),
        **{f"{name}_N": torch.tensor(values).to(device) for name, values in fields.items()},
    )


def _trained_tokens(
    credited: Sequence[CreditedSample], row: list[int], nodes: list[list[int]], allowed_sets: AllowedSets | None
) -> dict[str, list]:
    """The per-token lists of a row, in the order of its samples."""
    out: dict[str, list] = {
        k: []
        for k in (
            "hidden",
            "target",
            "temperature",
            "advantages",
            "weights",
            "old",
            "reference",
            "behaviour",
            "constrained",
            "sample",
            "token",
        )
    }
    allowed: dict[int, np.ndarray] = {}
    nan = float("nan")
    for i, path in zip(row, nodes, strict=True):
        scored, sample = credited[i].scored, credited[i].sample
        temperatures = {t: s.temperature for s in sample.spans for t in range(s.start, s.stop)}
        sets = {} if allowed_sets is None else allowed_sets(scored)
        for t, reason in enumerate(sample.reasons):
            if reason is not None:
                continue
            assert t > 0, "the first token of a context cannot be sampled"
            if t in sets:
                allowed[len(out["hidden"])] = sets[t]
            out["hidden"].append(path[t - 1])
            out["target"].append(sample.ids[t])
            out["temperature"].append(temperatures[t])
            out["advantages"].append(credited[i].advantages[t])
            out["weights"].append(credited[i].weights[t])
            out["old"].append(nan if scored.old is None else scored.old[t])
            out["reference"].append(nan if scored.reference is None else scored.reference[t])
            out["behaviour"].append(sample.behaviour[t])
            out["constrained"].append(sample.constrained[t])
            out["sample"].append(i)
            out["token"].append(t)
    return {**out, "allowed": _stack(allowed, len(out["hidden"]))}


def _stack(allowed: dict[int, np.ndarray], count: int) -> np.ndarray | None:
    """Rows of packed sets, all ones where a token is free."""
    if not allowed:
        return None
    words = len(next(iter(allowed.values())))
    stacked = np.full((count, words), -1, dtype=np.int32)
    for n, bits in allowed.items():
        stacked[n] = bits
    return stacked


def reasons_of(sample_reasons: Sequence[MaskReason | None]) -> dict[str, int]:
    """How many tokens each reason masks; "trained" for those without one."""
    counts: dict[str, int] = {}
    for reason in sample_reasons:
        name = "trained" if reason is None else str(reason)
        counts[name] = counts.get(name, 0) + 1
    return counts
