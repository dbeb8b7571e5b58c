"""A policy's folder in a checkpoint -> a plain Hugging Face folder for any other program."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from agentrl.errors import ConfigError, MissingError, RunFailedError
from agentrl.models.folders import load_model, save_hf_folder, weight_files
from agentrl.models.lora import CONFIG, WEIGHTS, AdaptedModel, is_adapter, load_into, read_config
from agentrl.models.names import is_hub_id, resolve

Dtype = Literal["float32", "bfloat16"]
_OURS = ("optimizer.safetensors", "policy.json")  # what training keeps beside the model


def export_folder(source: Path, dest: Path, dtype: Dtype, *, merge: bool = False) -> Path:
    """Write `source`'s model to `dest` with every float weight in `dtype`; `config.json` says so. An adapter becomes a
    folder that peft reads, or, with `merge`, the whole model that it makes of its base.

    The folder appears whole or not at all. Raises `ConfigError` where `dest` is a file or a folder that holds
    something, and where there is nothing to merge, `MissingError` where `source` is no whole model folder or its base
    is not here, and `RunFailedError` for a full disk.
    """
    if is_adapter(source):
        return _export_merged(source, dest, dtype) if merge else _export_adapter(source, dest, dtype)
    if merge:
        raise ConfigError("--merge: this policy is whole weights, and no adapter", "leave --merge out")
    weights = weight_files(source)
    with _new_folder(dest) as folder:
        for path in sorted(source.iterdir()):
            if path.is_file() and path not in weights and path.name not in _OURS:
                shutil.copyfile(path, folder / path.name)
        for path in weights:
            _convert(path, folder / path.name, dtype)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    return dest


def _export_adapter(source: Path, dest: Path, dtype: Dtype) -> Path:
    base = read_config(source)[1]
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if not is_hub_id(base):  # for other programs an embedded name means nothing, its folder does
        config["base_model_name_or_path"] = str(_base_folder(source, base))
    with _new_folder(dest) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _convert(source / WEIGHTS, folder / WEIGHTS, dtype)
    return dest


def _export_merged(source: Path, dest: Path, dtype: Dtype) -> Path:
    """W + (alpha / rank) B A of every adapted layer, computed in float32."""
    import torch

    lora, base = read_config(source)
    origin = _base_folder(source, base)
    model = AdaptedModel(load_model(origin, "float32"))
    load_into(model.add("policy", lora), source, lora)
    whole = model.merged("policy")
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    whole.config.dtype = getattr(torch, dtype)
    with _new_folder(dest) as folder:
        save_hf_folder(whole, None, folder)
        weights = weight_files(origin)
        for path in sorted(origin.iterdir()):
            if path.is_file() and path not in weights and path.name not in _OURS and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
        for path in folder.iterdir():
            path.chmod(0o644)
    return dest


def _base_folder(source: Path, base: str) -> Path:
    try:
        return resolve(base)
    except MissingError as error:
        raise MissingError(f"{source} adapts {base or 'a model without a name'}: {error.cause}", error.fix) from error


def _convert(source: Path, dest: Path, dtype: Dtype) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target = getattr(torch, dtype)
    tensors = {n: t.to(target) if t.is_floating_point() else t for n, t in load_file(source).items()}
    save_file(tensors, dest, {"format": "pt"})
    dest.chmod(0o644)  # safetensors leaves a file that only its owner can read


@contextmanager
def _new_folder(dest: Path) -> Iterator[Path]:
    """A folder to fill beside `dest`, which it becomes when the body ends without a fault."""
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        kind = "holds files" if dest.is_dir() else "is a file"
        raise ConfigError(f"DEST: {dest} {kind}; nothing was written", "name a new folder, or empty that one")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    except OSError as error:
        raise ConfigError(
            f"DEST: {dest} cannot be written ({error.strerror or error})", "name another folder"
        ) from error
    try:
        yield temp
        temp.chmod(0o755)
        temp.replace(dest)
    except OSError as error:
        raise RunFailedError(
            f"{dest} cannot be written ({error.strerror or error})", "make room, or name another disk"
        ) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
