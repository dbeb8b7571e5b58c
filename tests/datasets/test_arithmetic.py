"""The embedded sums: right answers, and no pair of numbers in both splits."""

from __future__ import annotations

import pytest

from agentrl.data import EMBEDDED, embedded_tasks, overlap
from agentrl.errors import ConfigError


def test_the_answers_are_right_and_the_splits_share_no_question() -> None:
    train, held = (embedded_tasks("arithmetic", split) for split in ("train", "eval"))
    assert {"train": len(train), "eval": len(held)} == dict(EMBEDDED["arithmetic"].sizes)
    words = {"plus": "+", "minus": "-", "times": "*"}
    for task in (*train, *held):
        _, _, a, sign, b = task.question.rstrip("?").split()
        x, y = int(a), int(b)
        expected = {"+": x + y, "-": x - y, "*": x * y}[words[sign]]
        assert task.references == (str(expected),)
    assert overlap(train, held) == []
    assert len({task.id for task in train}) == len(train)


def test_the_held_out_set_is_the_same_for_every_seed() -> None:
    assert embedded_tasks("arithmetic", "eval", seed=1) == embedded_tasks("arithmetic", "eval", seed=2)
    assert embedded_tasks("arithmetic", seed=1) != embedded_tasks("arithmetic", seed=2)
    with pytest.raises(ConfigError, match=r"data\.limit: 500 is more than"):
        embedded_tasks("arithmetic", limit=500)
