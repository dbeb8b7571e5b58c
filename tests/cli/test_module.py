from __future__ import annotations

import subprocess
import sys

from agentrl import __version__


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert __version__ in done.stdout
