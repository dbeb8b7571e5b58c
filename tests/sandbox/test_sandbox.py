"""What a caller of the sandbox gets: results, queueing, cancelling, refusing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentrl.errors import MissingError
from agentrl.sandbox import Limits, Sandbox
from agentrl.sandbox.seccomp import build_filter


def test_a_program_runs_with_files_in_and_out() -> None:
    code = (
        "import numpy, sys\nprint(open('in/a.bin').read())\nopen('out.txt', 'w').write('b')\nsys.stderr.write('x\\n')"
    )
    result = asyncio.run(Sandbox().run(code, {"in/a.bin": b"hello"}, ["out.*", "in/a.bin", "absent"]))
    assert (result.status, result.returncode, result.stdout, result.stderr) == ("ok", 0, "hello\n", "x\n")
    assert result.files == {"in/a.bin": b"hello", "out.txt": b"b"}


def test_an_error_gives_its_code_and_traceback() -> None:
    result = asyncio.run(Sandbox().run("import sys\nsys.exit(3)"))
    assert (result.status, result.returncode) == ("error", 3)
    result = asyncio.run(Sandbox().run("def f(): 1 / 0\nf()"))
    assert result.status == "error"
    assert "line 1, in f" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_text_that_no_file_can_hold_is_the_programs_error() -> None:
    assert asyncio.run(Sandbox().run("print('\ud800')")).status == "ok"
    assert asyncio.run(Sandbox().run("print(1)\0")).status == "error"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a//b", "./a"])
def test_a_path_that_leaves_the_workspace_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        asyncio.run(Sandbox().run("", {name: b""}))


def test_input_files_that_do_not_fit_are_a_result() -> None:
    sandbox = Sandbox(Limits(workspace_mib=2))
    too_big = asyncio.run(sandbox.run("", {"a": bytes(6 << 20)}))
    clash = asyncio.run(sandbox.run("", {"a": b"", "a/b": b""}))
    assert too_big.status == clash.status == "files"
    assert "No space left" in too_big.stderr
    assert "do not fit" in clash.stderr


def test_calls_beyond_the_limit_wait_and_say_how_long() -> None:
    async def main() -> tuple[float, list[float], list[float], int]:
        sandbox = Sandbox(max_concurrent=2)
        ticks = 0

        async def count() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        counter = asyncio.create_task(count())
        begin = time.monotonic()
        results = await asyncio.gather(*(sandbox.run("import time; time.sleep(0.5)") for _ in range(4)))
        took = time.monotonic() - begin
        counter.cancel()
        return took, [r.queue_s for r in results], [r.wall_s for r in results], ticks

    took, queue_s, wall_s, ticks = asyncio.run(main())
    assert took >= 1.0
    assert sum(q > 0.4 for q in queue_s) == 2
    assert sum(q < 0.4 for q in queue_s) == 2
    assert all(w >= 0.5 for w in wall_s)
    assert all(w < took for w in wall_s)
    assert ticks > 20  # the event loop stayed free


def test_one_sandbox_serves_several_event_loops() -> None:
    sandbox = Sandbox(max_concurrent=1)

    async def main() -> list[str]:
        return [r.stdout for r in await asyncio.gather(sandbox.run("print(1)"), sandbox.run("print(2)"))]

    assert asyncio.run(main()) == asyncio.run(main()) == ["1\n", "2\n"]


def alive(marker: str) -> bool:
    """Whether a process on the host has `marker` as its last argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(marker.encode() + b"\0"):
                return True
        except OSError:
            continue
    return False


def sleeper(marker: str) -> str:
    # The marker is put together inside, so that no command line of the host's side ends with it.
    start, end = marker[:5], marker[5:]
    return (
        "import os, sys\n"
        f"os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{start}' + '{end}'])"
    )


def test_cancelling_ends_everything_inside() -> None:
    marker = f"agentrl-cancelled-{os.getpid()}"

    async def main() -> None:
        task = asyncio.create_task(Sandbox().run(sleeper(marker)))
        while not alive(marker):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 30))
    assert not alive(marker)


@pytest.mark.parametrize("victim", ["caller", "supervisor"])
def test_everything_inside_dies_with_the_host_side(victim: str) -> None:
    marker = f"agentrl-{victim}-{os.getpid()}"
    program = f"import asyncio\nfrom agentrl.sandbox import Sandbox\nasyncio.run(Sandbox().run({sleeper(marker)!r}))"
    caller = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 30
    while not alive(marker) and time.monotonic() < end:
        time.sleep(0.05)
    assert alive(marker)
    children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    os.kill(caller.pid if victim == "caller" else int(children[0]), signal.SIGKILL)
    end = time.monotonic() + 2
    while alive(marker) and time.monotonic() < end:
        time.sleep(0.02)
    gone = not alive(marker)
    assert (caller.wait(10) != 0, gone) == (True, True)


def test_probe_passes_and_rung_names_the_isolation() -> None:
    asyncio.run(Sandbox().probe())
    rung = Sandbox().rung()
    assert "bubblewrap" in rung
    assert "network" in rung
    assert "seccomp" in rung


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for call in (Sandbox().run("print(1)"), Sandbox().probe()):
        with pytest.raises(MissingError) as fault:
            asyncio.run(call)
        assert "apt-get install bubblewrap" in fault.value.fix
    with pytest.raises(MissingError):
        Sandbox().rung()


def test_without_namespaces_it_refuses_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not pytest's own, which the sandbox's uid may not enter
        fake = Path(folder) / "bwrap"
        fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
        for path in (fake, fake.parent):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(MissingError, match="setting up uid map") as fault:
            asyncio.run(Sandbox().run("print(1)"))
    assert "namespaces" in fault.value.fix


def test_a_program_that_is_not_isolated_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_all = bytes.fromhex("060000000000ff7f")  # one instruction: return ALLOW
    monkeypatch.setattr("agentrl.sandbox.sandbox.build_filter", lambda: allow_all)
    with pytest.raises(MissingError, match="does not isolate"):
        asyncio.run(Sandbox().probe())


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"limits\.memory_mib"):
        Limits(memory_mib=0)


def test_the_filter_has_a_program_for_both_architectures_only() -> None:
    assert len(build_filter("x86_64")) % 8 == len(build_filter("aarch64")) % 8 == 0
    assert build_filter("x86_64") != build_filter("aarch64")
    with pytest.raises(MissingError, match="riscv64"):
        build_filter("riscv64")
