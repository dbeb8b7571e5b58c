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
    """The longest beginning of `text` that encodes to at most `limit` tokens, and how many tokens were cut.

    A cut inside a character, or one that encodes differently alone, moves back until it fits.
    """
    ids = encode(text)
    if len(ids) <= limit:
        return text, 0
    keep = max(0, limit)
    while keep > 0:
        cut = decode(ids[:keep]).rstrip("�")
        if len(encode(cut)) <= limit:
            return cut, len(ids) - keep
        keep -= 1
    return "", len(ids)


def pack_results(
    texts: Sequence[str], capacity: int, separator: int, encode: Encode, decode: Decode, packing: Packing = "ffd"
) -> list[TextBin]:
    """Bins of at most `capacity` tokens, in the order in which their outputs are merged.

    `separator` tokens stand between two items, so every item counts its length and one separator, and a bin of
    capacity C holds C + separator of that. An item longer than C is cut to C and alone. "single" puts each item in
    a bin of its own; "truncate" lays all in one bin and cuts what does not fit.
    """
    if packing == "truncate":
        return _one_bin(texts, capacity, separator, encode, decode)
    lengths = [len(encode(text)) + separator for text in texts]
    if packing == "single":
        groups = [(i,) for i in range(len(texts))]
    else:
        groups = [b.items for b in first_fit_decreasing(lengths, capacity + separator)]
    bins = []
    for group in groups:
        members = tuple(sorted(group))
        cuts = [cut_to(texts[i], capacity, encode, decode) for i in members]
        used = sum(len(encode(text)) for text, _ in cuts) + separator * (len(cuts) - 1)
        bins.append(TextBin(members, tuple(text for text, _ in cuts), used, sum(cut for _, cut in cuts)))
    return sorted(bins, key=lambda b: b.first_item)


def _one_bin(texts: Sequence[str], capacity: int, separator: int, encode: Encode, decode: Decode) -> list[TextBin]:
    kept: list[str] = []
    used = cut_tokens = 0
    for text in texts:
        room = capacity - used - (separator if kept else 0)
        cut, lost = cut_to(text, room, encode, decode)
        cut_tokens += lost
        if cut:
            used += len(encode(cut)) + (separator if kept else 0)
            kept.append(cut)
    return [TextBin(tuple(range(len(kept))), tuple(kept), used, cut_tokens)] if kept else []
