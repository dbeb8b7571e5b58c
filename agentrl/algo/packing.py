"""First-fit-decreasing bin packing, for System 1's prompts and for rows of training samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bin:
    """`items` are indices into the lengths, in the order of placement (longest first); `used` <= capacity.

    `truncated`: the one item is longer than the capacity, and `used` is the capacity it is cut to. A caller that
    may not cut (training rows) gives such an item a bin of its own length.
    """

    items: tuple[int, ...]
    used: int
    truncated: bool

    @property
    def first_item(self) -> int:
        """The smallest index: digests of several bins are merged in this order."""
        return min(self.items)


class _Rooms:
    """Free space of n bins in a max tree: the first bin with enough room is found in O(log n)."""

    def __init__(self, num_bins: int, capacity: int) -> None:
        self.size = 1
        while self.size < num_bins:
            self.size *= 2
        self.tree = [capacity] * (2 * self.size)

    def take_first_fit(self, length: int) -> int:
        node = 1
        while node < self.size:
            node *= 2
            if self.tree[node] < length:
                node += 1
        chosen = node - self.size
        self.tree[node] -= length
        while node > 1:
            node //= 2
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])
        return chosen


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Bin]:
    """Pack items into bins by exact first-fit-decreasing (MARS, bin packing; bins <= 11/9 OPT + 6/9).

    An item longer than the capacity is truncated to it and stays alone. The others, longest first (ties by index),
    go into the first open bin with room. Truncated bins come first, in index order, then the rest as they opened.
    Deterministic; O(n log n). Raises `ValueError` for a capacity below 1 or a negative length.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if any(length < 0 for length in lengths):
        raise ValueError("lengths must not be negative")
    truncated = [Bin((i,), capacity, True) for i, length in enumerate(lengths) if length > capacity]
    fitting = sorted((i for i, length in enumerate(lengths) if length <= capacity), key=lambda i: -lengths[i])
    rooms = _Rooms(len(fitting), capacity)
    contents: list[list[int]] = []
    for item in fitting:
        chosen = rooms.take_first_fit(lengths[item])
        if chosen == len(contents):
            contents.append([])
        contents[chosen].append(item)
    return truncated + [Bin(tuple(items), sum(lengths[i] for i in items), False) for items in contents]
