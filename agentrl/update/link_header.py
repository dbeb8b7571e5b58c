"""What a link file of ours says about itself, read without torch, so that `check` can tell whose links they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.errors import DataError, MissingError

_LONGEST = 1 << 24  # bytes of a header


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a file, from its first bytes; no tensor is loaded. `training` is None for random weights, and
    empty where nobody said. Raises `MissingError` and `DataError`."""
    if not path.is_file():
        raise MissingError(f"there is no link file {path}", "train the links, or name the folder that holds them")
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size < _LONGEST else {}
        found = {key: json.loads(value) for key, value in header["__metadata__"].items()}
    except (ValueError, AttributeError, TypeError, KeyError):
        raise DataError(
            f"{path} is cut short or no link file of ours", "fetch the link again, or use a .pt file"
        ) from None
    return {"training": {}, **found}
