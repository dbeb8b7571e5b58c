"""What the sandbox shows: a read-only root of the interpreter, its packages and the C libraries, and one workspace.

Inside, the interpreter lies at /opt/python and the site-packages at /opt/packages, wherever they lie on the host, so
no path of a home or a project exists. There is no shell and no other program. /box is the only writable place (a
size-capped tmpfs; /tmp and /workspace point into it), with a small /dev/shm beside it for locks between processes.

Folders of packages that hold the answers of tasks are empty inside: the data sets that scikit-learn and scipy bring
along, of which `dsbench-sklearn` is made, and agentrl itself where it is installed from a wheel.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

INNER_UID = 1000
_PYTHON, _PACKAGES = "/opt/python", "/opt/packages"
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_ROOT_LINKS = ("/lib", "/lib32", "/lib64")
_SHM_MIB = 16
_EMPTY = ("sklearn/datasets/data", "scipy/spatial/tests/data", "agentrl")  # below site-packages

# One thread each: thread pools count as processes, and many calls share the machine.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "LOKY_MAX_CPU_COUNT",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Arguments for bubblewrap around the binds (host path, inner path), the inner interpreter and its environment."""

    binds: tuple[tuple[str, str], ...]
    mounts_before: tuple[str, ...]
    mounts_after: tuple[str, ...]
    python: str
    env: dict[str, str]


def _package_folders() -> list[str]:
    """The running interpreter's site-packages; the user's own (in a home) stay out."""
    paths = sysconfig.get_paths()
    found: list[str] = []
    for folder in (paths["purelib"], paths["platlib"], *site.getsitepackages()):
        real = os.path.realpath(folder)
        if os.path.isdir(real) and real not in found:
            found.append(real)
    return found


def build_layout(workspace_mib: int) -> Layout:
    """The layout for the running interpreter, with a workspace of `workspace_mib`."""
    base = Path(sys.base_prefix).resolve()
    executable = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]  # the venv's real interpreter
    python = f"{_PYTHON}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    packages = _package_folders()
    binds = [(path, path) for path in _SYSTEM if os.path.exists(path)]
    links: list[str] = []
    for path in _ROOT_LINKS:
        if os.path.islink(path):
            links += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds.append((path, path))
    binds.append((str(executable), python))
    binds += [(str(base / lib), f"{_PYTHON}/{lib}") for lib in ("lib", "lib64") if (base / lib).is_dir()]
    binds += [(folder, f"{_PACKAGES}/{index}") for index, folder in enumerate(packages)]
    mounts_before = ["--proc", "/proc", "--dev", "/dev", *links]
    mounts_after = [
        *("--size", str(_SHM_MIB << 20), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(workspace_mib << 20), "--perms", "0700", "--tmpfs", "/box"),
        *("--symlink", "box/tmp", "/tmp", "--symlink", "box/work", "/workspace", "--remount-ro", "/"),
    ]
    for index, folder in enumerate(packages):
        for inner in (f"{_PACKAGES}/{index}/{name}" for name in _EMPTY if os.path.isdir(f"{folder}/{name}")):
            mounts_after += ["--size", "4096", "--perms", "0555", "--tmpfs", inner, "--remount-ro", inner]
    env = {
        "PATH": f"{_PYTHON}/bin",
        "LD_LIBRARY_PATH": f"{_PYTHON}/lib",
        "HOME": "/box/work",
        "USER": "agent",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(["/box/work", *(f"{_PACKAGES}/{index}" for index in range(len(packages)))]),
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",  # what was printed before a limit struck is kept
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "Agg",
        **dict.fromkeys(_ONE_THREAD, "1"),
    }
    return Layout(tuple(binds), tuple(mounts_before), tuple(mounts_after), python, env)
