"""Model names -> local folders. A name is embedded (`smollm2-135m`), tiny (`tiny-llama`), a folder, or a hub id."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import MissingError
from agentrl.models import smollm2, tiny
from agentrl.models.cache import home, install_folder
from agentrl.models.folders import weight_files

TINY_NAMES = tuple(f"tiny-{architecture}" for architecture in tiny.ARCHITECTURES)
KNOWN_NAMES = (smollm2.NAME, *TINY_NAMES)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

Kind = Literal["embedded", "tiny", "folder", "hub"]


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    kind: Kind
    folder: Path | None
    note: str


def resolve(name: str) -> Path:
    """The local folder of a model, in Hugging Face layout with safetensors.

    Embedded and tiny models are made in the cache on first use (`smollm2-135m` takes a download of 93 MB and about
    20 s, the tiny ones milliseconds and no torch). A folder is named by a path that exists, a hub id is looked up in
    the local Hugging Face cache. Raises `MissingError` where the model is not there, `ConfigError` for a bad tiny size.
    """
    found = find(name)
    return found if found is not None else prepare(name)


def find(name: str) -> Path | None:
    """The folder of a model that is already on this machine, else None. Makes and downloads nothing.

    Raises `MissingError` for a folder or hub snapshot that is there but not whole or not safetensors.
    """
    cached = _cached_at(name)
    if cached is not None:
        return cached if cached.is_dir() else None
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike `Path.is_dir`, no error below a folder that this user may not read
        weight_files(path)
        return path.resolve()
    return _find_hub(name) if _HUB_ID.fullmatch(name) else None


def is_hub_id(name: str) -> bool:
    """Whether a name is of the form org/name, and no folder here."""
    return bool(_HUB_ID.fullmatch(name)) and not os.path.isdir(Path(name).expanduser())


def prepare(name: str) -> Path:
    """Make the model ready and return its folder; a second call, or one by another process, finds it made.

    Raises `MissingError` as `resolve` does.
    """
    dest = _cached_at(name)
    if dest is not None:
        spec = tiny.parse(name)
        return install_folder(dest, smollm2.make if spec is None else lambda folder: tiny.make(spec, folder))
    found = find(name)
    if found is not None:
        return found
    raise _not_found(name)


def known_models() -> tuple[KnownModel, ...]:
    """Every name that needs neither path nor hub, with its folder where it is already made."""
    notes = {smollm2.NAME: "SmolLM2-135M-Instruct, bfloat16, 269 MB; made from a 93 MB download"}
    return tuple(
        KnownModel(name, "tiny" if name in TINY_NAMES else "embedded", find(name), notes.get(name, "random weights"))
        for name in KNOWN_NAMES
    )


def _cached_at(name: str) -> Path | None:
    """Where the cache keeps (or would keep) an embedded or tiny model; None for other names."""
    if name == smollm2.NAME:
        return home() / "models" / name
    if tiny.parse(name) is not None:
        return home() / "models" / f"{name}.v{tiny.FORMAT}"
    return None


def _find_hub(name: str) -> Path | None:
    """A whole snapshot of a hub id in the local Hugging Face cache."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        weight_files(folder)
    except MissingError as error:
        raise MissingError(f"{name}: the local snapshot is not whole ({error.cause})", f"hf download {name}") from None
    return folder


def _not_found(name: str) -> MissingError:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return MissingError(f"model {name!r}: there is no such folder", "check the path")
    if _HUB_ID.fullmatch(name):
        return MissingError(
            f"model {name!r} is neither a folder here nor in the local Hugging Face cache",
            f"hf download {name}, or name a local folder or an embedded model ({smollm2.NAME})",
        )
    near = difflib.get_close_matches(name.lower(), KNOWN_NAMES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(KNOWN_NAMES)}"
    return MissingError(f"there is no model called {name!r}", f"{hint} A folder or a hub id (org/name) works too")
