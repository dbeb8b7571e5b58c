"""Reading a dead call's workspace: plain files only, as bytes, under caps."""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Iterator
from typing import Any

_MAX_DEPTH, _MAX_FILES = 16, 256


def _walk(folder: int, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    """(path, descriptor of its folder) of everything that is not a folder. No link is followed."""
    with os.scandir(folder) as entries:
        listed = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
    for name, is_dir in listed:
        if not is_dir:
            yield prefix + name, folder
        elif depth < _MAX_DEPTH:
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError:
                continue
            try:
                yield from _walk(below, f"{prefix}{name}/", depth + 1)
            finally:
                os.close(below)


def _read_plain(name: str, folder: int, room: int) -> bytes | str:
    """A file's bytes, or why they stay behind."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as fault:
        return "not a plain file" if fault.errno in (errno.ELOOP, errno.ENXIO) else os.strerror(fault.errno or 0)
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return "not a plain file"
        if info.st_size > room:
            return "over the limit"
        return file.read(room)


def collect(folder: int, patterns: list[str], limits: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, str]]:
    """The files that match, and the names left out with their reasons. The tree is dead: nothing changes meanwhile."""
    files: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    room = limits["workspace_mib"] << 20
    for path, parent in _walk(folder) if patterns else ():
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            continue
        if len(files) + len(left_out) >= _MAX_FILES:
            left_out["..."] = f"more than {_MAX_FILES} files"
            break
        got = _read_plain(path.rpartition("/")[2], parent, min(room, limits["file_mib"] << 20))
        name = path.encode(errors="replace").decode(errors="replace")
        if isinstance(got, bytes):
            files[name] = got
            room -= len(got)
        else:
            left_out[name] = got
    return files, left_out
