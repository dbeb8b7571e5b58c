"""Where a run goes: GPUs first, else the CPU. `detect` looks at the machine, `plan` is pure.

Neither imports torch, so that `check` and `doctor` can plan in milliseconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.config.schema import LaunchConfig
from agentrl.errors import ConfigError, MissingError

GIB = 1024**3
MAX_THREADS_PER_CORE = 4
_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use. `index` counts the visible ones, as torch does."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def bf16(self) -> bool:
        return self.capability >= _BF16_CAPABILITY


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this process may use. `cores` counts its CPU set under its cgroup quota, `memory_bytes` is free memory
    under its cgroup limit, `total_bytes` all that there is. `cpu_bf16`: the processor computes bfloat16 itself.
    `torch_cuda` is the CUDA version the installed torch was built for, None for a CPU build."""

    cores: int
    memory_bytes: int
    cpu_bf16: bool = False
    gpus: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where one run goes. `gpus` are indices of visible GPUs, empty on the CPU; `native_bf16` tells whether bfloat16 is
    computed by the device itself (elsewhere it is emulated: correct and slow). `available_bytes` is free memory, or the
    memory of the planned GPUs together. `ranks` trainer processes, the driver among them, have `rank_threads` each
    while all compute; the driver has `threads` elsewhere. On GPUs rank r uses GPU r."""

    device: Literal["cpu", "cuda"]
    gpus: tuple[int, ...]
    threads: int
    native_bf16: bool
    available_bytes: int
    ranks: int = 1
    rank_threads: int = 1


def plan(launch: LaunchConfig, hardware: Hardware, *, trains: bool = True) -> Plan:
    """Place a run on a machine: GPUs first. `launch.gpus` none takes every GPU, a number exactly so many, 0 the CPU.
    Without `trains` no trainer rank starts: `launch.ranks` asks for nothing, and the plan is of one rank.

    Raises `MissingError` where GPUs were asked for that are not there, or that the installed torch cannot use, and
    `ConfigError` for more ranks than GPUs and for far more threads than cores: torch ends a process that cannot start
    them.
    """
    ranks = launch.ranks if trains else 1
    most = MAX_THREADS_PER_CORE * hardware.cores
    if launch.threads is not None and launch.threads > most:
        raise ConfigError(
            f"launch.threads is {launch.threads}, more than {most}: this process may use {hardware.cores} cores",
            f"set launch.threads to {hardware.cores}, or leave it out",
        )
    usable = hardware.gpus if hardware.torch_cuda is not None else ()
    wanted = len(usable) if launch.gpus is None else launch.gpus
    if wanted > len(usable):
        raise _missing_gpus(wanted, ranks, launch.threads, hardware)
    chosen = usable[:wanted]
    if chosen and ranks > len(chosen):
        raise ConfigError(
            f"launch.ranks is {ranks}, but the run has {len(chosen)} GPU{'' if len(chosen) == 1 else 's'}",
            f"set launch.ranks to at most {len(chosen)}: each trainer rank needs a GPU of its own",
        )
    if ranks * (launch.threads or 1) > most:
        raise ConfigError(
            f"launch.ranks is {ranks}: {ranks * (launch.threads or 1)} threads are more than {most}, "
            f"and this process may use {hardware.cores} cores",
            f"set launch.ranks to at most {_most_ranks(launch.threads, hardware)}",
        )
    return Plan(
        device="cuda" if chosen else "cpu",
        gpus=tuple(gpu.index for gpu in chosen),
        threads=launch.threads or hardware.cores,
        native_bf16=all(gpu.bf16 for gpu in chosen) if chosen else hardware.cpu_bf16,
        available_bytes=sum(gpu.memory_bytes for gpu in chosen) if chosen else hardware.memory_bytes,
        ranks=ranks,
        rank_threads=launch.threads or max(1, hardware.cores // ranks),
    )


def _most_ranks(threads: int | None, hardware: Hardware) -> int:
    """How many ranks are advised where the cores are the limit: one a core, or fewer of many threads each."""
    return min(hardware.cores, MAX_THREADS_PER_CORE * hardware.cores // (threads or 1))


def _missing_gpus(wanted: int, ranks: int, threads: int | None, hardware: Hardware) -> MissingError:
    """The fix is whole: with fewer GPUs, or on the CPU, it names `launch.ranks` too where so many ranks do not fit."""
    there, on_cpu = len(hardware.gpus), _most_ranks(threads, hardware)
    to_cpu = "set launch.gpus: 0" + (f" and launch.ranks: {on_cpu}" if ranks > on_cpu else "") + " to run on the CPU"
    if there >= wanted:
        return MissingError(
            f"launch.gpus is {wanted}, but the installed torch is a CPU build and cannot use the {there} GPU(s) here",
            f"install the GPU build (make setup GPU=1), or {to_cpu}",
        )
    fewer = f"set launch.gpus: {there}" + (f" and launch.ranks: {there}" if ranks > there else "")
    fix = to_cpu if there == 0 else fewer
    return MissingError(
        f"launch.gpus is {wanted}, but this process sees {there or 'no'} GPU{'' if there == 1 else 's'}",
        f"{fix}, or run where {wanted} {'is' if wanted == 1 else 'are'} visible (see nvidia-smi, CUDA_VISIBLE_DEVICES)",
    )


def detect() -> Hardware:
    """Look at this machine through the operating system and `nvidia-smi`; torch is not imported."""
    return Hardware(
        cores=_cores(),
        memory_bytes=_free_memory(),
        cpu_bf16=_cpu_bf16(),
        gpus=visible_gpus(_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        torch_cuda=_torch_cuda(),
        total_bytes=_total_memory(),
    )


def visible_gpus(listing: str, visible: str | None) -> tuple[Gpu, ...]:
    """Parse `nvidia-smi --query-gpu=index,uuid,name,memory.total,compute_cap` and keep what `CUDA_VISIBLE_DEVICES`
    leaves, in its order. As CUDA does, an entry that matches nothing hides itself and all that follow."""
    found = []
    for line in listing.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) != 5 or not fields[3].isdigit():
            continue
        major, _, minor = fields[4].partition(".")
        capability = (int(major), int(minor or 0)) if major.isdigit() else (0, 0)
        found.append((fields[0], fields[1], fields[2], int(fields[3]) * 1024**2, capability))
    if visible is not None:
        kept = []
        for entry in (part.strip() for part in visible.split(",")):
            match = [gpu for gpu in found if entry and (entry == gpu[0] or gpu[1].startswith(entry))]
            if len(match) != 1:
                break
            kept.extend(match)
        found = kept
    return tuple(Gpu(i, name, memory, capability) for i, (_, _, name, memory, capability) in enumerate(found))


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _torch_cuda() -> str | None:
    """The `cuda` line of torch's version file, read as text."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version_file = Path(spec.submodule_search_locations[0]) / "version.py"
    if not version_file.is_file():
        return None
    text = version_file.read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _total_memory() -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _free_memory() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free = int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # The page cache counts as used, but makes way for whoever needs memory.
        cache = re.search(r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
        free = min(free, max(0, int(limit) - int(used) + int(cache[1] if cache else 0)))
    return free


def _cpu_bf16() -> bool:
    return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", _read("/proc/cpuinfo")))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
