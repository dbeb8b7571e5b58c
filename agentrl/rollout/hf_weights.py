"""Copying new weights into a model, or into an adapter on it, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.errors import EngineError
from agentrl.models.lora import PREFIX
from agentrl.protocols import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def copy_weights(model: PreTrainedModel, source: WeightSource, policy: str) -> None:
    """Copy every parameter of `source` into `model`, by name, converted to the model's dtype.

    Names and shapes are checked before anything is written. One name of a tied group is enough. Raises
    `EngineError` that names the first fault.
    """
    copy_parameters(dict(model.named_parameters(remove_duplicate=False)), source, policy)


@torch.no_grad()
def copy_parameters(own: Mapping[str, torch.nn.Parameter], source: WeightSource, policy: str) -> None:
    """The same into the parameters of a model, or of an adapter, whose files have peft's prefix."""
    if (source.folder is None) == (source.tensors is None):
        raise EngineError(f"no weights for policy {policy!r}", "give a folder or tensors, one of them")
    given = dict(source.tensors) if source.tensors is not None else dict(_read(source.folder))
    for name, tensor in given.items():
        if name not in own:
            raise EngineError(f"unexpected weight {name!r} for policy {policy!r}", "send this model's own parameters")
        if tuple(tensor.shape) != tuple(own[name].shape):
            raise EngineError(
                f"weight {name!r} for policy {policy!r} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}",
                "send weights of the same model",
            )
    written = {id(own[name]) for name in given}
    for name, parameter in own.items():
        if id(parameter) not in written:
            raise EngineError(f"weight {name!r} for policy {policy!r} is missing", "send every parameter")
    for name, tensor in given.items():
        own[name].copy_(tensor)


def _read(folder: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    assert folder is not None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"no .safetensors file in {folder}", "name a model folder in Hugging Face layout")
    for path in files:
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name.removeprefix(PREFIX), handle.get_tensor(name)
