"""Leaving root: sources shown where any user can read them, then an ordinary uid for good."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_STAGES = ("/mnt", "/media", "/srv", "/opt", "/run")


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def stage(sources: list[str]) -> list[str]:
    """Show `sources` at paths that any user can enter, in a mount namespace of this process alone. Needs root.

    Root's interpreter may lie under a folder that the unprivileged user cannot enter. Returns the new paths in order.

    Raises:
        OSError: no right to mount, or a source is missing.
    """
    system = libc()
    _checked(system.unshare(_CLONE_NEWNS), "unshare the mount namespace")
    base = next(s for s in _STAGES if os.path.isdir(s) and not any(p == s or p.startswith(s + "/") for p in sources))
    _checked(system.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    options = b"size=1m,mode=755"
    _checked(system.mount(b"tmpfs", base.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options), f"mount tmpfs on {base}")
    staged = []
    for index, source in enumerate(sources):
        target = f"{base}/{index}"
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        flags = _MS_BIND | _MS_REC
        _checked(system.mount(os.fsencode(source), target.encode(), None, flags, None), f"bind {source}")
        staged.append(target)
    return staged


def drop_to(uid: int) -> None:
    """Become an ordinary user for good: the kernel's limits on processes do not bind uid 0."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
