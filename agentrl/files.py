"""Files that survive a kill at any moment: whole files appear by rename, growing files grow by whole lines of JSON."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, MissingError, RunFailedError

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


def home() -> Path:
    """`$AGENTRL_HOME`, or `~/.cache/agentrl`: prepared models and data sets. Read at each call, so that a test may set
    it."""
    configured = os.environ.get("AGENTRL_HOME")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "agentrl"


def encode(value: Any) -> bytes:
    """One line of JSON without its newline. NaN and infinities become null; numpy and torch scalars become numbers."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate of a model's text becomes its JSON escape, which reads back as the same character.
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, Path) else float(value)


def _finite(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | Path):
        return value if not isinstance(value, Path) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    number = float(value)
    return number if math.isfinite(number) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file that may still be growing: a torn last line is left out.

    A missing file has no lines.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in whole_lines(path.read_bytes())]


def whole_lines(raw: bytes) -> list[bytes]:
    """The whole lines of JSON in `raw`, without those that a kill or a lost machine tore at the end."""
    # A lost machine may also leave zero bytes where a line should be, so the end is parsed.
    lines = raw.split(b"\n")[:-1]
    while lines:
        try:
            json.loads(lines[-1])
        except ValueError:
            lines.pop()
        else:
            break
    return [line for line in lines if line.strip()]


def append(path: Path, line: bytes, *, durable: bool) -> None:
    """Append one whole line, or nothing: what a full disk tore is cut off again. `durable` waits for the disk.

    Raises `RunFailedError` naming the path.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(fd, line[written:])
                if durable:
                    os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
    except OSError as error:
        raise failed(path, error) from error


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file at once: a reader, or a kill, finds the old bytes or the new ones. Raises `OSError`."""
    temp = path.with_name(f".{path.name}.tmp")
    try:
        with temp.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
        sync(path.parent)
    except OSError:
        temp.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until the disk has a file or a folder's list of names; nothing to do where there is none."""
    if path.exists():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_tree(folder: Path) -> None:
    """Wait until the disk has a folder with everything in it."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def refused(error: BaseException) -> bool:
    """Whether the disk refused a write. Native writers (safetensors) name the number only in their text."""
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return True
    return any(f"(os error {number})" in str(error) for number in _REFUSED)


def failed(path: Path, error: Exception) -> RunFailedError:
    """The fault of a write that the disk refused, naming the path."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    fix = "free some space, check the folder's permissions, or choose another folder; a train goes on with --resume"
    return RunFailedError(f"cannot write {path}: {reason}", fix)


def install_folder(dest: Path, make: Callable[[Path], None]) -> Path:
    """Return `dest`, letting `make` fill it first where it does not exist.

    `make` writes into a temporary folder beside `dest`, which is flushed to disk and then renamed: a `dest` that
    exists is whole, whatever was killed before. Processes that ask at once wait for the first on a lock file, and
    temporary folders left by a killed one are removed. Whatever `make` raises goes through, and `dest` stays absent.
    Raises `MissingError` where the disk is full or not writable.
    """
    if dest.is_dir():
        return dest
    try:
        return _install(dest, make)
    except Exception as error:  # native writers have kinds of their own; raised again unless the disk refused
        if not refused(error):
            raise
        raise MissingError(
            f"cannot write {dest}: {error}", "free some space there, or set AGENTRL_HOME to another folder"
        ) from error


def _install(dest: Path, make: Callable[[Path], None]) -> Path:
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _locked(dest.with_name(f".{dest.name}.lock")):
        if dest.is_dir():
            return dest
        prefix = f".{dest.name}.tmp-"
        for left_over in dest.parent.glob(f"{prefix}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        temp = Path(tempfile.mkdtemp(prefix=prefix, dir=dest.parent))
        try:
            make(temp)
            sync_tree(temp)
            temp.chmod(0o755)
            temp.rename(dest)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return dest


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class RunLock:
    """An exclusive lock that ends with the process, however it ends, and that forked children do not hold."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 64, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            self._fd = None
            raise ConfigError(
                f"run {path.parent.name!r} is in use by process {holder or 'unknown'}",
                "wait for it or stop it, or choose another --name",
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        ref = weakref.ref(self)

        def close_in_child() -> None:
            # An engine process that outlives a killed driver must not keep the run locked.
            lock = ref()
            if lock is not None and lock._fd is not None:
                os.close(lock._fd)
                lock._fd = None

        os.register_at_fork(after_in_child=close_in_child)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
