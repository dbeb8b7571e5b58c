"""Text that names a file or a folder: what no system can look up is refused before anyone tries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

_LONGEST_NAME, _LONGEST_PATH = 255, 4095


def path_fault(text: str) -> str | None:
    """Why `text` cannot name a file or a folder, as `cause; fix`; None where it can, whether or not it is there."""
    if not text.strip():
        return "an empty path; name a file or a folder, or leave it out"
    if "\0" in text:
        return "a path with a NUL character; name a file or a folder"
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > _LONGEST_PATH or max(len(part) for part in raw.split(b"/")) > _LONGEST_NAME:
        return f"a path of {len(text)} characters, too long for a file system; give a shorter one"
    if text.startswith("~"):
        try:
            Path(text).expanduser()
        except RuntimeError:
            return f"{text.split('/')[0][:60]} is no user's home folder; write the path out"
    return None


def _usable(text: str) -> str:
    if fault := path_fault(text):
        raise ValueError(fault)
    return text


PathText = Annotated[str, AfterValidator(_usable)]
"""The type of a config key that names a file, a folder, or something that may also be a name."""
