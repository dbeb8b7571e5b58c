"""Model folders in Hugging Face layout: written whole, read without pickles or remote code."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.errors import MissingError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, every shard of its index present.

    Raises `MissingError` where the folder has no config, no safetensors (pickled weights are never read), or lacks a
    shard.
    """
    if not (folder / "config.json").is_file():
        raise MissingError(
            f"{folder} is not a model folder: it has no config.json", "name a Hugging Face layout folder"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        pickled = any(folder.glob("pytorch_model*.bin"))
        cause = f"{folder} lacks {absent[0]}" + (" and holds pickled weights, which are never read" if pickled else "")
        raise MissingError(cause, "convert or fetch the model again as safetensors")
    return tuple(folder / name for name in names)


def count_parameters(folder: Path) -> int:
    """The number of stored parameters (tied ones once), from the safetensors headers alone.

    Raises `MissingError` where a file is cut short or no safetensors file.
    """
    return sum(math.prod(shape) for shape in weight_shapes(folder).values())


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every stored tensor by name, from the headers alone. Raises as `count_parameters`."""
    return {n: tuple(e["shape"]) for path in weight_files(folder) for n, e in _read_header(path).items()}


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    broken = MissingError(f"{path} is cut short or no safetensors file", "remove its folder and fetch the model again")
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise broken
        raw = handle.read(length)
    try:
        header = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
    except ValueError:
        raise broken from None
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size != 8 + length + end:
        raise broken
    return header


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars for loading and saving out of our logs, and leave its setting as it was."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_hf_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dest: Path) -> None:
    """Write a plain folder: config, safetensors, generation config, tokenizer and chat template.

    Tied embeddings are stored once and tied again on load (safetensors refuses aliases). A head that the config calls
    tied but that has weights of its own, as after training an untied copy, is refused, not dropped: `ValueError`.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.get_text_config().tie_word_embeddings and head is not None and head.weight is not embeddings.weight:
        same = head.weight.shape == embeddings.weight.shape and bool((head.weight == embeddings.weight).all())
        if not same:
            raise ValueError("config.tie_word_embeddings is true but the head differs from the embeddings; untie it")
        model.tie_weights()
    dest.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(str(dest))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(dest))


def load_model(
    folder: Path,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    *,
    attn_implementation: str | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a causal language model from a local folder, in evaluation mode, onto `device`.

    Safetensors only, no remote code, nothing fetched. Raises `MissingError` (see `weight_files`), also when a weight
    is missing, since transformers would fill it with random numbers and only warn.
    """
    import torch
    from transformers import AutoModelForCausalLM

    weight_files(folder)
    with no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=attn_implementation,
            output_loading_info=True,
        )
    model, info = loaded
    if info["missing_keys"]:
        raise MissingError(
            f"{folder} lacks the weights {', '.join(sorted(info['missing_keys'])[:3])}",
            "fetch or export the model again",
        )
    whole: PreTrainedModel = model.eval().to(device)
    return whole


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer, with its chat template. No remote code, nothing fetched."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
