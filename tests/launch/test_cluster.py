from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from agentrl.errors import MissingError, RunFailedError
from agentrl.launch import cluster as cluster_module
from agentrl.launch.cluster import Cluster
from agentrl.launch.guard import guard_folder, kill_processes_in, processes_in

_DRIVER = """
# A shell's background job starts with SIGINT ignored, and hands that on.
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import subprocess, sys, time
from agentrl.launch.cluster import Cluster

class Engine:
    def start(self):
        import os, subprocess
        from agentrl.launch.guard import guard_group
        guard_group()
        return os.getpid(), subprocess.Popen(["sleep", "600"]).pid

def main():
    cluster = Cluster.start(address=sys.argv[2] or None)
    import ray
    engine = ray.remote(Engine).options(num_cpus=0).remote()
    pids = ray.get(engine.start.remote())
    print("ready", cluster._folder, ray.get_runtime_context().gcs_address, *pids, flush=True)
    if sys.argv[1] == "close":
        cluster.close()
    elif sys.argv[1] == "raise":
        raise ValueError("the run broke")
    elif sys.argv[1] != "forget":
        time.sleep(600)

main()
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _descendants(pid: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def _wait_gone(pids: set[int], timeout_s: float) -> set[int]:
    deadline = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if _alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _listening(pids: set[int]) -> set[str]:
    """The addresses, in the kernel's hexadecimal, at which the processes accept TCP connections."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    links = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    return {inodes[link] for link in links & set(inodes)}


def _drive(mode: str, address: str = "", **environment: str) -> tuple[subprocess.Popen[str], list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER), mode, address],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


_SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("SIGTERM", "SIGINT", "raise", "forget")]


@pytest.mark.parametrize("mode", ["SIGKILL", "close", *_SLOW])
def test_no_process_and_no_folder_is_left_however_the_driver_ends(mode: str) -> None:
    process, ready = _drive(mode)
    assert ready[:1] == ["ready"], "the driver did not start"
    pids = {int(pid) for pid in ready[3:]} | (_descendants(process.pid) if process.poll() is None else set())
    if mode.startswith("SIG"):
        assert len(pids) > 5  # gcs, raylet, agents, the actor, its guard and its child
        assert ready[2].startswith("127.0.0.1:")
        assert _listening(pids) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, in both tables
        process.send_signal(signal.Signals[mode])
    process.wait(30)
    assert _wait_gone(pids, 12) == set()
    deadline = time.monotonic() + 12
    while Path(ready[1]).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(ready[1]).exists()


@pytest.mark.slow
def test_a_cluster_joined_by_address_is_left_alone_but_our_actors_die() -> None:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path, for Ray's sockets
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--include-dashboard=false"]
    options = [f"--port={port}", "--num-cpus=1", f"--temp-dir={folder}", f"--object-store-memory={200 * 2**20}"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    owner = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert owner.stdout is not None
        address = next(line.split()[-1] for line in owner.stdout if "Local node IP" in line) + f":{port}"
        assert any("--block" in line for line in owner.stdout)
        for mode in ("SIGKILL", "close"):
            guest, joined = _drive(mode, address, RAY_AUTH_MODE="disabled")
            assert joined[1] == "None"
            guest.kill() if mode == "SIGKILL" else guest.wait(20)
            guest.wait(10)
            assert _wait_gone({int(pid) for pid in joined[3:]}, 15) == set()
        assert owner.poll() is None
        assert any(True for _ in processes_in(folder))
    finally:
        owner.terminate()
        owner.wait(20)
        kill_processes_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_start_that_hangs_is_told_by_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    release = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: release.wait(30))
    with pytest.raises(RunFailedError, match=r"starting ray on loopback took more than 0\.2 s"):
        Cluster.start(timeout_s=0.2)
    release.set()


def test_a_start_that_fails_names_the_cause_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    def fail(**_: object) -> None:
        raise ConnectionError("nobody listens there")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RunFailedError, match="ConnectionError: nobody listens there"):
        Cluster.start()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunFailedError, match=r"joining the ray cluster at 10\.0\.0\.1:6379 failed"):
        Cluster.start(address="10.0.0.1:6379")


def test_ray_starts_on_loopback_without_dashboard_or_usage_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    seen: dict[str, object] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(options))
    Cluster.start(num_cpus=3, num_gpus=0).close()
    assert seen["_node_ip_address"] == "127.0.0.1"
    assert seen["include_dashboard"] is False
    assert (seen["num_cpus"], seen["num_gpus"], seen["log_to_driver"]) == (3, 0, False)
    assert seen["object_store_memory"] == 200 * 2**20
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_missing_ray_is_told_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"(?s)ray is not installed.*pip install"):
        Cluster.start()


def test_processes_are_found_and_killed_by_an_open_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        inside = subprocess.Popen(["sleep", "600"], stdout=log)
    outside = subprocess.Popen(["sleep", "600"])
    try:
        assert list(processes_in(tmp_path)) == [inside.pid]
        reaper = threading.Thread(target=inside.wait)
        reaper.start()
        assert kill_processes_in(tmp_path, 5)
        reaper.join(5)
        assert inside.returncode == -signal.SIGKILL
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


def test_a_guard_called_off_removes_nothing(tmp_path: Path) -> None:
    guard = guard_folder(tmp_path)
    guard.terminate()
    guard.wait(5)
    assert tmp_path.is_dir()
