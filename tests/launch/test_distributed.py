"""Process groups: sums, orders, faults, and that no worker outlives its driver (M-13, M-25)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agentrl.errors import ConfigError, RunFailedError
from agentrl.launch.distributed import Group, backend_of

HERE = Path(__file__).parent


@pytest.fixture
def workers(monkeypatch) -> ModuleType:
    """The functions of `rank_workers`, which a spawned process finds by the same path."""
    monkeypatch.syspath_prepend(str(HERE))
    import rank_workers

    return rank_workers


@pytest.fixture
def start(workers) -> Iterator[Any]:
    groups: list[Group] = []

    def begin(num_ranks: int) -> Group:
        groups.append(Group.start(num_ranks, workers.obedient))
        return groups[-1]

    yield begin
    for group in groups:
        group.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left(pids: tuple[int, ...], within: float) -> list[int]:
    deadline = time.monotonic() + within
    while (found := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def listening(pids: list[int]) -> set[str]:
    """The addresses, in the kernel's hexadecimal, at which the processes accept TCP connections."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    links = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    return {inodes[link] for link in links & set(inodes)}


def test_orders_replies_sums_and_copies_reach_every_rank_over_loopback(start) -> None:
    group = start(3)
    assert group.num_ranks == 3
    assert listening([os.getpid(), *group.pids]) == {"0100007F"}  # 127.0.0.1
    group.send([("echo", "a"), ("echo", {"b": 2})])
    assert group.meet() == [(1, "a"), (2, {"b": 2})]
    for dtype in (torch.float32, torch.float64):
        group.send([("add", dtype)] * 2)
        total = torch.full((3,), 0.5, dtype=dtype)
        group.add_to_first([total])
        assert total.tolist() == [3.5] * 3
    for dtype in (torch.float32, torch.bfloat16):
        group.send([("spread", dtype)] * 2)
        given = torch.linspace(-1, 1, 5).to(dtype)
        group.spread_first([given])
        assert all(torch.equal(given, taken) for taken in group.meet())
    group.close()
    assert left(group.pids, 0) == []
    group.close()


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ("refuse", ConfigError, "the rank's cause\nfix: the rank's fix"),
        pytest.param(
            *("break", RunFailedError, "trainer rank 1 of 2 failed: ZeroDivisionError: no luck\nfix: "),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_of_a_rank_is_the_runs(start, order, error, message) -> None:
    group = start(2)
    group.send([(order,)])
    with pytest.raises(error) as caught:
        group.meet()
    assert message in str(caught.value)


def test_a_rank_that_dies_ends_the_run_at_once_though_another_works(start) -> None:
    group = start(3)
    group.send([("dawdle",), ("die",)])
    began = time.monotonic()
    with pytest.raises(RunFailedError, match="trainer rank 2 of 3 ended: killed by SIGKILL, as the system does out of"):
        group.meet()
    group.close()
    assert time.monotonic() - began < 5
    assert left(group.pids, 0) == []


def test_a_rank_that_dies_in_a_collective_or_before_an_order_is_named(start) -> None:
    group = start(2)
    group.send([("die between",)])
    with pytest.raises(RunFailedError, match="trainer rank 1 of 2 ended: killed by SIGKILL"):
        group.add_to_first([torch.ones(1 << 20)])
    with pytest.raises(RunFailedError, match="trainer rank 1 of 2 ended: killed by SIGKILL"):
        group.send([("echo",)])
    group.close()


def test_a_rank_that_does_not_come_up_is_named_and_the_next_group_starts(workers) -> None:
    with pytest.raises(RunFailedError, match="trainer rank 1 of 2 ended: exit code 7"):
        Group.start(2, workers.stillborn)
    group = Group.start(2, workers.obedient)
    group.close()


_MORE = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("SIGTERM", "SIGINT", "forget", "raise", "close")]


@pytest.mark.parametrize("mode", ["SIGKILL", *_MORE])
def test_no_worker_is_left_however_the_driver_ends(mode) -> None:
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "rank_workers.py"), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = tuple(int(word) for word in driver.stdout.readline().split()[1:])
    assert pids
    if mode.startswith("SIG"):
        driver.send_signal(signal.Signals[mode])
    driver.communicate(timeout=15)
    assert left(pids, 5) == []


@pytest.mark.slow
def test_a_driver_that_waits_for_its_workers_can_be_interrupted() -> None:
    command = [sys.executable, str(HERE / "rank_workers.py"), "meet"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = tuple(int(word) for word in driver.stdout.readline().split()[1:])
    time.sleep(0.2)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=8)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert left(pids, 5) == []


def test_the_backend_follows_the_device() -> None:
    assert (backend_of("cpu"), backend_of("cuda")) == ("gloo", "nccl")
