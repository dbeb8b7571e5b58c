"""Where prepared models live, and how a folder gets there whole or not at all."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import MissingError
from agentrl.files import home, refused, sync_tree

__all__ = ["home", "install_folder"]


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
    except Exception as error:
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
