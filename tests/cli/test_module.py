from __future__ import annotations

import subprocess
import sys

from agentrl import __version__


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert __version__ in done.stdout


def test_what_check_refuses_is_told_before_anything_heavy_is_imported(agentrl):
    done = agentrl("mars", "train", "hle", modules=True)
    assert done.code == 3, done
    assert done.err.index("error: launch.gpus is 8") < done.err.index("error: tools.web")
    assert "MODULES " in done.err
    assert not {"torch", "transformers", "vllm"} & set(done.err.partition("MODULES ")[2].split())
