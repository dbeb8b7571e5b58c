"""New weights as a model folder, the form in which every engine outside this process takes them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.config.schema import LoraConfig
from agentrl.errors import EngineError
from agentrl.models.lora import is_adapter, write_config, write_weights
from agentrl.protocols import WeightSource


@contextmanager
def weight_folder(source: WeightSource, model: Path, within: Path | None = None) -> Iterator[Path]:
    """The folder of `source`; tensors become a temporary one with links to `model`'s config and tokenizer files, below
    `within` (none: where the system keeps temporary files).

    Raises `EngineError` for a source that is neither or both, or a folder without safetensors files.
    """
    if (source.folder is None) == (source.tensors is None):
        raise EngineError("a weight source holds neither a folder nor tensors, or both", "give one of them")
    if source.folder is not None:
        if not any(source.folder.glob("*.safetensors")):
            raise EngineError(f"no .safetensors file in {source.folder}", "name a model folder in Hugging Face layout")
        yield source.folder
        return
    assert source.tensors is not None
    folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=within))
    try:
        for path in model.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                (folder / path.name).symlink_to(path.resolve())
        _write(source.tensors, folder / "model.safetensors", tied=_is_tied(model))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def adapter_folder(source: WeightSource, lora: LoraConfig, within: Path | None = None) -> Iterator[Path]:
    """The folder of an adapter in peft's form; tensors become a temporary one, as above. Raises `EngineError`."""
    if (source.folder is None) == (source.tensors is None):
        raise EngineError("a weight source holds neither a folder nor tensors, or both", "give one of them")
    if source.folder is not None:
        if not is_adapter(source.folder):
            raise EngineError(f"{source.folder} holds no adapter", "name a folder that training or peft has written")
        yield source.folder
        return
    assert source.tensors is not None
    folder = Path(tempfile.mkdtemp(prefix="agentrl-adapter-", dir=within))
    try:
        write_weights(folder, source.tensors)
        write_config(folder, lora, "", source.tensors)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(tensors: Mapping[str, Any], path: Path, *, tied: bool) -> None:
    """One file; of tensors that share memory one is written, and of tied embeddings never the head."""
    from safetensors.torch import save_file

    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    kept = {}
    for name in sorted(tensors, key=lambda n: (n.startswith("lm_head"), n)):
        tensor = tensors[name].detach()
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place in seen or (tied and name == "lm_head.weight"):
            continue
        seen.add(place)
        kept[name] = tensor.cpu().contiguous()
    save_file(kept, path, metadata={"format": "pt"})


def _is_tied(model: Path) -> bool:
    return bool(json.loads((model / "config.json").read_text("utf-8")).get("tie_word_embeddings", False))
