"""The escape suite's other half: using up the machine, and what comes out. `test_plain_user.py` drops root first."""

from __future__ import annotations

import asyncio
import os
import pickle
import textwrap
import time
from pathlib import Path

import pytest

from agentrl.sandbox import Limits, Result, Sandbox

SHORT = Limits(
    wall_s=8,
    cpu_s=8,
    memory_mib=192,
    processes=12,
    file_mib=8,
    workspace_mib=24,
    open_files=64,
    output_bytes=20_000,
)
SLACK_S = 2.0


def run(code: str, limits: Limits = SHORT, **kwargs: object) -> Result:
    return asyncio.run(Sandbox(limits).run(textwrap.dedent(code), **kwargs))  # type: ignore[arg-type]


def short(**changes: float) -> Limits:
    return Limits(**{name: changes.get(name, getattr(SHORT, name)) for name in SHORT.__slots__})  # type: ignore[arg-type]


# --- memory, files, output ----------------------------------------------------------------------------------------


def test_a_memory_bomb_in_one_process_is_ended() -> None:
    result = run("x = [0] * (10 * 2**30)")
    assert result.status == "memory", result
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_a_memory_bomb_spread_over_children_is_ended(kind: str) -> None:
    code = f"""
        import mmap, os, time
        for _ in range(6):
            if os.fork() == 0:
                if {kind!r} == "private":
                    block = bytearray(b"x") * (60 << 20)
                else:
                    block = mmap.mmap(-1, 60 << 20)
                    block[:] = b"x" * 4096 * (60 << 8)
                time.sleep(60)
        time.sleep(60)
    """
    result = run(code)
    assert result.status == "memory", result
    assert result.wall_s < SLACK_S + 2


def test_memory_shared_by_forks_is_counted_once() -> None:
    code = """
        import os, time
        block = bytearray(b"x") * (100 << 20)
        for _ in range(3):
            if os.fork() == 0:
                time.sleep(0.4)
                os._exit(0)
        for _ in range(3):
            os.wait()
        print("fits")
    """
    result = run(code)
    assert (result.status, result.stdout) == ("ok", "fits\n"), result


def test_an_output_flood_is_ended_and_cut() -> None:
    result = run("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert result.status == "output"
    assert result.stdout == "x" * SHORT.output_bytes
    assert result.wall_s < SLACK_S + 1
    result = run("import os\nfor _ in range(30): os.write(1, b'o' * 500); os.write(2, b'e' * 500)")
    assert result.status == "output"
    assert len(result.stdout) + len(result.stderr) == SHORT.output_bytes


def test_a_huge_file_is_refused() -> None:
    code = """
        import os
        for make in (lambda f: f.write(b"x" * (9 << 20)), lambda f: f.truncate(9 << 20)):
            try:
                with open("big", "wb") as file:
                    make(file)
                print("made", os.path.getsize("big"))
            except OSError as fault:
                print(fault.errno)
    """
    assert run(code).stdout == "27\n27\n"


def test_the_workspace_is_capped() -> None:
    code = """
        total = 0
        try:
            for index in range(40):
                with open(f"f{index}", "wb") as file:
                    total += file.write(b"x" * (4 << 20))
        except OSError as fault:
            print(fault.errno, total <= 24 << 20)
    """
    assert run(code).stdout == "28 True\n"


def test_a_flood_of_empty_files_is_ended() -> None:
    code = """
        for index in range(10**7):
            open(f"/tmp/{index}", "w").close()
    """
    assert run(code).status == "files"


def test_open_files_are_capped() -> None:
    result = run("files = [open('/dev/null') for _ in range(100)]")
    assert result.status == "error"
    assert "Errno 24" in result.stderr


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
        "import time; time.sleep(600)",
        "import os, signal\nfor n in (2, 15, 1): signal.signal(n, signal.SIG_IGN)\nos.kill(os.getpid(), 19)",
    ],
    ids=["busy loop", "regex", "sleep", "stopped"],
)
def test_the_wall_clock_limit_strikes(code: str) -> None:
    begin = time.monotonic()
    result = run("print('started', flush=True)\n" + code, short(wall_s=1.0))
    assert (result.status, result.stdout) == ("timeout", "started\n"), result
    assert 1.0 <= result.wall_s < 1.0 + SLACK_S
    assert time.monotonic() - begin < 20  # with the start of interpreters on a busy machine


def test_the_cpu_limit_sums_over_the_tree() -> None:
    code = """
        import os
        for _ in range(3):
            os.fork()
        while True:
            pass
    """
    result = run(code, short(cpu_s=0.8, wall_s=20))
    assert result.status == "cpu", result
    assert result.wall_s < 5


def test_the_cpu_limit_counts_children_that_ended() -> None:
    code = """
        import os, time
        while True:
            if os.fork() == 0:
                end = time.process_time() + 0.1
                while time.process_time() < end:
                    pass
                os._exit(0)
            os.wait()
    """
    result = run(code, short(cpu_s=0.6, wall_s=20))
    assert result.status == "cpu", result
    assert result.wall_s < 10


# --- what comes out -----------------------------------------------------------------------------------------------


def test_links_pipes_and_devices_are_not_followed_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the planted secret")
    code = f"""
        import os
        os.symlink({str(secret)!r}, "link")
        os.symlink("/etc/ld.so.cache", "link2")
        os.symlink({str(tmp_path)!r}, "folder")
        os.mkfifo("pipe")
        os.makedirs("a/b"); open("a/b/plain", "w").write("mine")
    """
    result = run(code, collect=["*"])
    assert result.files == {"a/b/plain": b"mine"}
    assert result.left_out == dict.fromkeys(["folder", "link", "link2", "pipe"], "not a plain file")


def test_a_poisoned_result_file_stays_bytes(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Poison:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(mark),))

    result = run(
        "print(sorted(__import__('os').listdir()))", files={"r.pkl": pickle.dumps(Poison())}, collect=["*.pkl"]
    )
    assert result.stdout == "['r.pkl']\n"
    assert result.files == {"r.pkl": pickle.dumps(Poison())}
    assert not mark.exists()


def test_collected_bytes_are_capped() -> None:
    code = """
        for index in range(300):
            open(f"f{index:03}", "w").write("x")
        for index in range(5):
            open(f"big{index}", "wb").truncate(8 << 20)
    """
    result = run(code, collect=["*"])
    assert len(result.files) + len(result.left_out) <= 257
    assert result.left_out["..."] == "more than 256 files"
    assert sum(map(len, result.files.values())) <= SHORT.workspace_mib << 20
    assert "over the limit" in result.left_out.values()


def test_output_that_imitates_the_protocol_is_only_output() -> None:
    code = r"""
        import json, os
        head = {"status": "ended", "returncode": 0, "wall_s": 0, "out": 0, "err": 0, "files": [], "left_out": {}}
        head = json.dumps(head)
        fake = len(head).to_bytes(8, "big") + head.encode()
        for fd in range(64):
            try:
                os.write(fd, fake + b"refused: ok")
            except OSError:
                pass
        os._exit(7)
    """
    result = run(code)
    assert (result.status, result.returncode) == ("error", 7)
    assert '"status": "ended"' in result.stdout


def test_no_descriptor_of_the_host_leaks_in() -> None:
    result = run("import os; print([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in range(3)], "
                 "[n for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}')])")  # fmt: skip
    assert result.stdout == "['/dev/null', 'pipe', 'pipe'] []\n", result
