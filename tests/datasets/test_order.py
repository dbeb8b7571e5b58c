"""A step's tasks depend on seed and step alone; copies between sets are found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.config.schema import DatasetConfig
from agentrl.data import fingerprint, load_tasks, order, overlap
from agentrl.data.order import sample
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task


def _tasks(n: int) -> list[Task]:
    return [Task(str(i), f"q{i}?") for i in range(n)]


@pytest.mark.parametrize(("size", "n"), [(10, 3), (7, 5), (5, 5), (6, 3), (4, 3), (1, 1), (9, 8), (100, 32)])
def test_every_epoch_holds_every_task_once_and_no_step_holds_one_twice(size: int, n: int) -> None:
    tasks = _tasks(size)
    steps = [[t.id for t in order(tasks, 3, step, n)] for step in range(1, 4 * size + 1)]
    assert all(len(set(step)) == n for step in steps)
    stream = [name for step in steps for name in step]
    for epoch in range(len(stream) // size):
        assert sorted(stream[epoch * size : (epoch + 1) * size], key=int) == [t.id for t in tasks]


def test_a_steps_tasks_are_a_function_of_seed_and_step_alone() -> None:
    tasks = _tasks(10)
    steps = list(range(1, 30))
    first = {step: order(tasks, 1, step, 4) for step in steps}
    random.Random(0).shuffle(steps)
    assert {step: order(tasks, 1, step, 4) for step in steps} == first
    assert any(order(tasks, 2, step, 4) != first[step] for step in steps)
    assert first[1] + first[2] != first[6] + first[7]


def test_without_shuffling_the_files_order_holds() -> None:
    tasks = _tasks(5)
    ids = [[t.id for t in order(tasks, 0, step, 2, shuffle=False)] for step in (1, 2, 3)]
    assert ids == [["0", "1"], ["2", "3"], ["4", "0"]]


def test_more_questions_a_step_than_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.questions_per_step: 6 is more than the 5"):
        order(_tasks(5), 0, 1, 6)
    with pytest.raises(ValueError, match="at least 1"):
        order(_tasks(5), 0, 0, 2)


def test_overlap_finds_copies_whatever_their_case_spaces_and_punctuation() -> None:
    train = [Task("a", "Who wrote  \u201cFaust\u201d?"), Task("b", "What is 2+3?"), Task("c", "A well-known man?")]
    held = [Task("x", "who wrote faust"), Task("y", "What is 2-3?"), Task("z", "a well known man")]
    assert overlap(train, held) == [("a", "x"), ("c", "z")]


def test_a_fingerprint_changes_with_content_and_order() -> None:
    tasks = _tasks(3)
    assert fingerprint(tasks) == fingerprint(list(tasks))
    assert len({fingerprint(tasks), fingerprint(tasks[::-1]), fingerprint(tasks[:2])}) == 3


def test_the_local_2wiki_splits_share_no_question(data_dir: Path) -> None:
    train, held = (load_tasks(DatasetConfig(path=f"2wiki_local_{s}.jsonl"), base=data_dir) for s in ("train", "dev"))
    assert overlap(train, held) == []
    assert len(overlap(train, train)) == len(train)


def test_a_sample_is_drawn_by_ids_and_a_larger_one_than_there_is_is_refused() -> None:
    tasks = _tasks(20)
    first = [t.id for t in sample(tasks, 6, 1)]
    assert first == sorted(first, key=int)
    assert [t.id for t in sample(tasks[::-1], 6, 1)] == first[::-1]
    assert [t.id for t in sample(tasks, 6, 2)] != first
    with pytest.raises(DataError, match="sample: 21 is more than the 20 tasks"):
        sample(tasks, 21, 1)


def test_every_step_holds_its_share_of_each_stratum_and_every_epoch_each_task_once() -> None:
    tasks = [Task(str(i), f"q{i}?", info={"kind": "a" if i < 20 else "b"}) for i in range(30)]
    steps = [order(tasks, 3, step, 6, stratify="kind") for step in range(1, 11)]
    assert all(sum(t.info["kind"] == "a" for t in step) == 4 for step in steps)
    assert sorted(int(t.id) for step in steps[:5] for t in step) == list(range(30))
    assert [t.id for t in steps[0]] != [t.id for t in order(tasks, 4, 1, 6, stratify="kind")]
    with pytest.raises(DataError, match=r"data\.stratify: task 0 has no 'colour'"):
        order(tasks, 3, 1, 6, stratify="colour")
