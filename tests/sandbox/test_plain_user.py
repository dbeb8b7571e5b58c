"""The escape suite again as an ordinary user, when these tests run as root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# Root's interpreter may lie where that user cannot enter, so everything needed is staged and used from there.
_BECOME_PLAIN = """
import json, os, sys
from agentrl.sandbox.supervisor.staging import drop_to, stage
spec = json.loads(sys.argv[1])
base, packages, project, suite = stage(spec["sources"])
drop_to(65000)
os.mkdir(spec["temp"], 0o755)
python = f"{base}/{spec['python']}"
options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", suite, "-c", os.devnull]
env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{project}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
os.chdir("/")
os.execve(python, [python, "-m", "pytest", *options, "--basetemp", spec["temp"] + "/t", suite], env)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: the suite itself ran as an ordinary user")
@pytest.mark.skipif(Path(sys.base_prefix) == Path("/usr"), reason="the system's interpreter cannot run from elsewhere")
def test_the_escape_suite_holds_for_a_plain_user(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for suite in Path(__file__).parent.glob("test_escape*.py"):
        shutil.copy(suite, tests)
    prefix = Path(sys.base_prefix).resolve()
    project = Path(__file__).parents[2]
    temp = Path(f"/tmp/agentrl-plain-{os.getpid()}")  # pytest's own temporary folder is root's alone
    spec = {
        "sources": [str(prefix), sysconfig.get_path("purelib"), str(project), str(tests)],
        "python": str(Path(sys._base_executable).resolve().relative_to(prefix)),  # type: ignore[attr-defined]
        "temp": str(temp),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BECOME_PLAIN, json.dumps(spec)], cwd=project, capture_output=True, timeout=300
        )
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, said
    assert " passed" in said, said
    assert "skipped" not in said, said
