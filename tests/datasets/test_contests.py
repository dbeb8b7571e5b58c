"""Problems of contests are known by year, part and number, however a collection spells them (MAPPA M-32)."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks, overlap
from agentrl.data.contests import ContestKey, contest_key, same_problem
from agentrl.types import Task


@pytest.mark.parametrize(
    ("name", "info", "key"),
    [
        ("1983-1", {"year": 1983, "problem_number": 1, "part": None}, ContestKey(1983, 1)),
        ("2024-II-5", {}, ContestKey(2024, 5, None, "ii")),
        ("x", {"year": "2024", "problem_number": "5", "part": "II"}, ContestKey(2024, 5, None, "ii")),
        ("x", {"Year": 2024, "Problem Number": 5.0}, ContestKey(2024, 5)),
        ("2025_AIME_I_3", {}, ContestKey(2025, 3, "aime", "i")),
        ("aime-2025-i-3", {}, ContestKey(2025, 3, "aime", "i")),
        ("AIME 2025 II Problem 15", {}, ContestKey(2025, 15, "aime", "ii")),
        ("0", {"url": "https://a.org/wiki/2022_AMC_12A_Problems/Problem_3"}, ContestKey(2022, 3, "amc12", "a")),
        ("0", {"year": 2022, "number": 3, "contest": "AMC 12", "part": "A"}, ContestKey(2022, 3, "amc12", "a")),
        ("0", {}, None),
        ("train-7-plus-5", {}, None),
        ("17", {"year": 2024}, None),
        ("2024-99", {}, None),
        ("2024-05", {}, None),
        ("2024-1-5", {}, None),
        ("eval-2024-gpt-4", {}, None),
    ],
)  # fmt: skip
def test_m32_a_contests_problem_is_read_from_columns_addresses_and_ids(name, info, key):
    assert contest_key(Task(name, "?", info=info)) == key


def test_m32_what_is_not_told_cannot_keep_two_problems_apart():
    key = ContestKey(2024, 5, None, "ii")
    assert same_problem(key, ContestKey(2024, 5, "aime", "ii"))
    assert same_problem(key, ContestKey(2024, 5))
    for other in (ContestKey(2024, 5, "aime", "i"), ContestKey(2023, 5, None, "ii"), ContestKey(2024, 6, None, "ii")):
        assert not same_problem(key, other)
    assert not same_problem(ContestKey(2020, 5, "aime"), ContestKey(2020, 5, "amc12"))
    assert not same_problem(key, None)


def test_m32_a_problem_worded_anew_overlaps_by_its_contest_year_and_number():
    train = [Task("2020-I-3", "Find $n$."), Task("q", "What is two and two?")]
    held = [Task("2020_AIME_I_3", "Determine the value of n."), Task("2020-II-3", "Another."), Task("1", "Other?")]
    assert overlap(train, held) == [("2020-I-3", "2020_AIME_I_3")]
    assert overlap(train, [Task("w", "what is  TWO and two")]) == [("q", "w")]


def test_m32_the_real_pool_has_a_key_for_each_problem_and_holds_no_amc_problem(data_dir: Path):
    columns = {"question": "prompt"}
    pool = load_tasks(DatasetConfig(path="aime_1983_2024.json", columns=columns), base=data_dir)
    keys = {contest_key(task) for task in pool}
    assert None not in keys
    assert len(keys) == len(pool) == 933
    amc = load_tasks(DatasetConfig(path="amc.json", columns=columns), base=data_dir)
    assert overlap(pool, amc) == []
    assert len(overlap(pool, [Task("0", "?", info={"year": 2011, "problem_number": 4})])) == 1


def test_m32_the_same_seed_draws_the_same_512_ids_whatever_the_files_order(data_dir: Path, tmp_path: Path):
    import json

    def drawn(path: Path, seed: int = 42) -> list[str]:
        config = DatasetConfig(path=str(path), columns={"question": "prompt"}, sample=512, sample_seed=seed)
        return [task.id for task in load_tasks(config)]

    pool = data_dir / "aime_1983_2024.json"
    first = drawn(pool)
    assert len(set(first)) == 512
    assert drawn(pool) == first
    assert drawn(pool, 43) != first
    turned = tmp_path / "turned.json"
    turned.write_text(json.dumps(json.loads(pool.read_text("utf-8"))[::-1]))
    assert drawn(turned) == first[::-1]
