"""Raw results -> bins that fit System 1's prompt (MARS section 4): first-fit decreasing over whole results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.algo.packing import first_fit_decreasing

Packing = Literal["ffd", "single", "truncate"]
Encode = Callable[[str], tuple[int, ...]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TextBin:
    """What one System 1 call reads. `first_item` is the smallest original index: outputs are merged in its order."""

    items: tuple[int, ...]
    texts: tuple[str, ...]
    used: int
    truncated_tokens: int

    @property
    def first_item(self) -> int:
        return min(self.items)


def cut_to(text: str, limit: int, encode: Encode, decode: Decode) -> tuple[str, int]:
    """The beginning of `text` that encodes to `limit` tokens, and how many tokens were cut.

    A cut inside a character, or one that encodes differently alone, moves back until it fits, so it may hold fewer.
    """
    ids = encode(text)
    return (text, 0) if len(ids) <= limit else _cut(text, ids, limit, encode, decode)


def _cut(text: str, ids: tuple[int, ...], limit: int, encode: Encode, decode: Decode) -> tuple[str, int]:
    keep = max(0, limit)
    while keep > 0:
        begun = decode(ids[:keep])
        for _ in range(3):  # bytes of a character that the cut went through
            if begun.endswith("\ufffd") and not text.startswith(begun):
                begun = begun[:-1]
        size = len(encode(begun))
        if size <= limit:
            return begun, len(ids) - size
        keep -= 1
    return "", len(ids)


def pack_results(
    texts: Sequence[str], capacity: int, separator: int, encode: Encode, decode: Decode, packing: Packing = "ffd"
) -> list[TextBin]:
    """Bins of at most `capacity` tokens, in the order in which their outputs are merged.

    `separator` tokens stand between two items, so every item counts its length and one separator, and a bin of
    capacity C holds C + separator of that. An item longer than C is cut to C and alone. "single" puts each item in
    a bin of its own; "truncate" lays all in one bin, in their order, and cuts everything beyond its end.
    """
    ids = [encode(text) for text in texts]
    if packing == "truncate":
        return _one_bin(texts, ids, capacity, separator, encode, decode)
    lengths = [len(one) + separator for one in ids]
    groups: list[tuple[int, ...]]
    if packing == "single":
        groups = [(i,) for i in range(len(texts))]
    else:
        groups = [b.items for b in first_fit_decreasing(lengths, capacity + separator)]
    bins = []
    for group in groups:
        members = tuple(sorted(group))
        if len(ids[members[0]]) > capacity:
            text, cut = _cut(texts[members[0]], ids[members[0]], capacity, encode, decode)
            bins.append(TextBin(members, (text,), len(ids[members[0]]) - cut, cut))
        else:
            used = sum(lengths[i] for i in members) - separator
            bins.append(TextBin(members, tuple(texts[i] for i in members), used, 0))
    return sorted(bins, key=lambda b: b.first_item)


def _one_bin(
    texts: Sequence[str],
    ids: Sequence[tuple[int, ...]],
    capacity: int,
    separator: int,
    encode: Encode,
    decode: Decode,
) -> list[TextBin]:
    """The beginning of all results laid end to end, as plain truncation would keep it."""
    kept: list[str] = []
    used = lost = 0
    for i, text in enumerate(texts):
        gap = separator if kept else 0
        cut = 0
        if used + gap + len(ids[i]) > capacity:
            text, cut = _cut(text, ids[i], capacity - used - gap, encode, decode)
            lost = cut + sum(map(len, ids[i + 1 :]))
        if text or not cut:
            kept.append(text)
            used += gap + len(ids[i]) - cut
        if cut:
            break
    return [TextBin(tuple(range(len(kept))), tuple(kept), used, lost)] if kept else []
