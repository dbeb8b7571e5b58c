"""Process groups of one run: worker processes that the driver starts, orders about, and takes with it.

The driver is rank 0. Ranks 1..N-1 are processes that it spawns; each has a pipe to the driver for orders and replies
(Python values), and all ranks share one `torch.distributed` group for tensors: gloo on the CPU, nccl on GPUs, met over
a free port of 127.0.0.1.

    driver (`Group`)                                workers (`Member`, in `serve`)
    start: spawn, rendezvous                        join, make ready, send
    send(one order per worker)            ------>   for order in member.orders(): work
    own work meanwhile
    meet(): a value from every worker     <------   member.send(value)
    add_to_first(tensors)                 <=====>   member.add_to_first(tensors)    (sum on rank 0)
    spread_first(tensors)                 <=====>   member.spread_first(tensors)    (rank 0's values on all)
    close: the workers are killed

Faults. All ranks meet at their pipes before a collective, so whoever waits can be interrupted, sees at once that a
rank died, and needs no time limit; within a collective a dead peer breaks the connection. The run ends with one message
that names the rank. An error that a worker raises is raised by the driver as it is. A worker whose driver is gone, even
by `kill -9`, ends itself: a thread of it looks for that. Workers leave Ctrl-C of a terminal to the driver.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from agentrl.errors import AgentRLError, RunFailedError

_ENDING_S = 5.0
_JOINING = timedelta(seconds=60)
_COLLECTIVE = timedelta(seconds=600)
_POLL_S = 0.5
_GO = "go"


@dataclass(frozen=True, slots=True)
class _Fault:
    """An error on its way from a worker to the driver. `kind` is set where it is made of cause and fix."""

    kind: type[AgentRLError] | None
    cause: str
    fix: str = ""


def backend_of(device: str) -> str:
    """The collective library of a device: nccl on "cuda", gloo on "cpu"."""
    return "nccl" if device == "cuda" else "gloo"


def _add(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        dist.reduce(tensor, dst=0)


def _spread(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


class Member:
    """A worker's end. Its tensors have the driver's shapes and order, in every collective."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank = rank
        self._pipe = pipe

    def orders(self) -> Iterator[Any]:
        """What the driver sends. Raises `EOFError` when it is gone, which ends the worker."""
        while True:
            yield self._pipe.recv()

    def send(self, value: object) -> None:
        self._pipe.send(value)

    def add_to_first(self, tensors: Iterable[Tensor]) -> None:
        """Give these to the driver's sum. Their values are void afterwards."""
        self.send(None)
        self._wait()
        _add(tensors)

    def spread_first(self, tensors: Iterable[Tensor]) -> None:
        """Take the driver's values."""
        self._wait()
        _spread(tensors)

    def _wait(self) -> None:
        word = self._pipe.recv()
        assert word == _GO, f"rank {self.rank} waits for a collective and was sent {type(word).__name__}"


class Group:
    """The driver's end. Make it by `Group.start`; not safe to share between threads."""

    def __init__(self, workers: Sequence[SpawnProcess], pipes: Sequence[Connection]) -> None:
        self._workers = workers
        self._pipes = pipes

    @classmethod
    def start(cls, num_ranks: int, serve: Callable[[Member], None], *, backend: str = "gloo") -> Group:
        """Spawn ranks 1..`num_ranks`-1, each of which runs `serve` (pickled by name), and meet them.

        The first value that `serve` sends says that it is ready. Raises what it raises before, and `RunFailedError` for
        a rank that does not come up.
        """
        assert num_ranks > 1, "one rank needs no group"
        assert not dist.is_initialized(), "a process has one group at a time"
        _keep_to_loopback()
        door = socket.socket()
        door.bind(("127.0.0.1", 0))
        door.listen(num_ranks)
        port = door.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, num_ranks, True, _JOINING, wait_for_workers=False, master_listen_fd=door.detach()
        )
        spawn = multiprocessing.get_context("spawn")
        workers: list[SpawnProcess] = []
        pipes: list[Connection] = []
        group = cls(workers, pipes)
        try:
            for rank in range(1, num_ranks):
                ours, theirs = spawn.Pipe()
                pipes.append(ours)
                arguments = (rank, num_ranks, port, backend, theirs, serve)
                worker = spawn.Process(target=_work, args=arguments, name=f"trainer-rank-{rank}", daemon=True)
                worker.start()
                theirs.close()
                workers.append(worker)
            group.meet()  # all are there, so that joining waits for none
            dist.init_process_group(backend, store=store, rank=0, world_size=num_ranks, timeout=_COLLECTIVE)
            group.meet()
        except BaseException:  # whatever ends the start ends the workers
            group.close()
            raise
        return group

    @property
    def num_ranks(self) -> int:
        return len(self._workers) + 1

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ..."""
        return tuple(worker.pid or 0 for worker in self._workers)

    def send(self, orders: Sequence[object]) -> None:
        """One order to each worker, in the order of their ranks."""
        for place, (pipe, order) in enumerate(zip(self._pipes, orders, strict=True)):
            try:
                pipe.send(order)
            except OSError as error:
                self._lost(place, error)

    def meet(self) -> list[Any]:
        """The next value that each worker sends, in the order of their ranks.

        Raises what a worker raised, and `RunFailedError` for one that ended.
        """
        values: dict[int, Any] = {}
        while len(values) < len(self._pipes):
            missing = {self._pipes[place]: place for place in range(len(self._pipes)) if place not in values}
            for ready in wait(list(missing)):
                assert isinstance(ready, Connection)
                place = missing[ready]
                try:
                    value = ready.recv()
                except (EOFError, ConnectionError) as error:
                    self._lost(place, error)
                if isinstance(value, _Fault):
                    self._raise(place, value)
                values[place] = value
        return [values[place] for place in range(len(self._pipes))]

    def add_to_first(self, tensors: Iterable[Tensor]) -> None:
        """Add to each tensor those of all workers, in its own dtype."""
        self.meet()
        self._together(_add, tensors)

    def spread_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' values to every worker."""
        self._together(_spread, tensors)

    def close(self) -> None:
        """End the workers, which hold nothing that is worth a farewell. Safe to call twice."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _together(self, collective: Callable[[Iterable[Tensor]], None], tensors: Iterable[Tensor]) -> None:
        self.send([_GO] * len(self._pipes))
        try:
            collective(tensors)
        except RuntimeError as error:
            ended = wait([worker.sentinel for worker in self._workers], timeout=_ENDING_S)
            dead = [place for place, worker in enumerate(self._workers) if worker.sentinel in ended]
            if not dead:
                raise RunFailedError(
                    f"the trainer ranks lost touch: {' '.join(str(error).split())[:200]}",
                    "go on from the last checkpoint with --resume, or with launch.ranks: 1",
                ) from error
            self._lost(dead[0], error)

    def _lost(self, place: int, error: Exception) -> NoReturn:
        """Raise for a worker that ended: the error that it sent before, or how it ended."""
        pipe, worker = self._pipes[place], self._workers[place]
        try:
            while pipe.poll():
                value = pipe.recv()
                if isinstance(value, _Fault):
                    self._raise(place, value)
        except (EOFError, OSError):
            pass
        worker.join(_ENDING_S)
        raise RunFailedError(
            f"trainer rank {place + 1} of {self.num_ranks} ended: {_ending(worker.exitcode)}",
            "free memory or lower launch.ranks, then go on from the last checkpoint with --resume",
        ) from error

    def _raise(self, place: int, fault: _Fault) -> NoReturn:
        if fault.kind is not None:
            raise fault.kind(fault.cause, fault.fix)
        raise RunFailedError(
            f"trainer rank {place + 1} of {self.num_ranks} failed: {fault.cause}",
            "run with launch.ranks: 1 to see more",
        )


def _ending(code: int | None) -> str:
    if code is None:
        return "it hangs"
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}" + (", as the system does out of memory" if code == -9 else "")


def _work(
    rank: int, num_ranks: int, port: int, backend: str, pipe: Connection, serve: Callable[[Member], None]
) -> None:
    """A worker process from its first to its last line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the driver decides
    threading.Thread(target=_end_with_driver, name="watch-driver", daemon=True).start()
    member = Member(rank, pipe)
    try:
        member.send(None)
        store = dist.TCPStore("127.0.0.1", port, num_ranks, False, _JOINING)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_COLLECTIVE)
        serve(member)
    except BaseException as fault:  # noqa: BLE001 - the driver raises it
        with contextlib.suppress(OSError):  # it is gone, or has closed the group
            pipe.send(_carried(fault))
    os._exit(1)  # the interpreter's own end would wait for peers


def _carried(fault: BaseException) -> _Fault:
    if isinstance(fault, AgentRLError) and type(fault).__init__ is AgentRLError.__init__:
        return _Fault(type(fault), fault.cause, fault.fix)
    return _Fault(None, " ".join(f"{type(fault).__name__}: {fault}".split())[:300])


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None, "a worker is spawned by the driver"
    while os.getppid() == driver.pid:
        time.sleep(_POLL_S)
    os._exit(1)


def _keep_to_loopback() -> None:
    """gloo and nccl connect over the interface of the host's name, which may be open to the network."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
