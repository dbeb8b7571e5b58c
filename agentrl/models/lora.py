"""LoRA adapters (arXiv 2106.09685): several on one frozen model, of which one at most is in use at a time.

Tensors go by the names that peft gives them, without its prefix: `model.layers.0.mlp.up_proj.lora_A.weight`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import LoraConfig
from agentrl.errors import ConfigError, DataError
from agentrl.models.folders import weight_shapes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from transformers import PreTrainedModel

_LAYER = re.compile(r"\.\d+\.")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapter:
    """How a policy sits on a model that it shares with others. `lora` None: the model alone. `start`: the folder that
    the adapter begins with; none begins at B = 0, which is the model itself."""

    lora: LoraConfig | None = None
    start: Path | None = None


NO_ADAPTERS: Mapping[str, Adapter] = MappingProxyType({})


class AdaptedModel:
    """A frozen model and its adapters by name. Adapters compute in the model's dtype. `transposed`: the adapted layers
    store their matrices so (as in GPT-2)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False)
        self._parameters: dict[str, dict[str, Parameter]] = {}
        self._keys: dict[str, str] = {}
        self._trained: set[str] = set()
        self._layers: list[Any] = []
        self.transposed = False
        self._active: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    @property
    def active(self) -> str | None:
        """The adapter in use; None is the model alone."""
        return self._active

    def add(self, name: str, lora: LoraConfig, *, seed: int = 0, trained: bool = False) -> Mapping[str, Parameter]:
        """Put a new adapter on the model and return its parameters. A is drawn from `seed`, B is 0.

        Raises `ConfigError` where `lora.target_modules` names something that is no linear layer of the model.
        """
        import peft
        import torch
        from peft.tuners.lora import LoraLayer

        assert name not in self._keys, f"there is an adapter {name!r} already"
        key = f"adapter{len(self._keys)}"  # names of policies may hold a dot, those of modules not
        targets, self.transposed = self._targets(lora)
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets), fan_in_fan_out=self.transposed
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are several adapters is what is wanted
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, self.model, key)
        self._layers = [m for m in self.model.modules() if isinstance(m, LoraLayer)]
        mark, found = f".{key}.", {}
        for path, parameter in self.model.named_parameters():
            if mark in path:
                parameter.data = parameter.data.to(self.model.dtype)
                found[path.replace(mark, ".")] = parameter
        self._keys[name], self._parameters[name] = key, found
        if trained:
            self._trained.add(name)
        self._switch(self._active)
        return found

    def parameters(self, name: str) -> Mapping[str, Parameter]:
        """An adapter's parameters, as `add` returned them."""
        return self._parameters[name]

    def use(self, name: str | None) -> None:
        """Let the model compute with one adapter, or with none."""
        if name != self._active:
            self._switch(name)

    def merged(self, name: str) -> PreTrainedModel:
        """The model with one adapter in its weights and none beside them; this object is spent."""
        from peft.tuners.lora import LoraLayer

        for path, layer in [(n, m) for n, m in self.model.named_modules() if isinstance(m, LoraLayer)]:
            layer.merge(adapter_names=[self._keys[name]])
            self.model.set_submodule(path, layer.get_base_layer())
        self._layers = []
        return self.model

    def _switch(self, name: str | None) -> None:
        for layer in self._layers:
            if name is None:
                layer.enable_adapters(False)
            else:
                layer.enable_adapters(True)
                layer.set_adapter([self._keys[name]], inference_mode=name not in self._trained)
        self._active = name

    def _targets(self, lora: LoraConfig) -> tuple[tuple[str, ...], bool]:
        """The layers' last names, and whether their matrices are stored transposed (as in GPT-2)."""
        from peft.tuners.lora import LoraLayer
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        head = self.model.get_output_embeddings()
        linear: dict[str, bool] = {}
        for path, module in self.model.named_modules():
            inner = module.get_base_layer() if isinstance(module, LoraLayer) else module
            inside = path.endswith(".base_layer") or ".lora_" in path
            if isinstance(inner, (nn.Linear, Conv1D)) and inner is not head and not inside:
                linear[path.rpartition(".")[2]] = isinstance(inner, Conv1D)
        targets = _chosen(lora, sorted(linear), type(self.model).__name__)
        return targets, any(linear[name] for name in targets)


def zero_layer(folder: Path) -> str:
    """The layer that `zero_adapter` stands on."""
    return min(linear_layers(folder))


def zero_adapter(folder: Path) -> dict[str, Tensor]:
    """An adapter of rank 1 that adds nothing, on one layer of a model folder."""
    import torch

    layer = zero_layer(folder)
    rows, columns = linear_layers(folder)[layer]
    return {f"{layer}.lora_A.weight": torch.zeros(1, columns), f"{layer}.lora_B.weight": torch.zeros(rows, 1)}


def share_models(policies: Mapping[str, Path], adapters: Mapping[str, Adapter]) -> tuple[tuple[str, ...], ...]:
    """The policies by the model that serves them: those among `adapters` that have a folder together, others alone."""
    groups: dict[Path | str, list[str]] = {}
    for name, folder in policies.items():
        groups.setdefault(folder if name in adapters else name, []).append(name)
    return tuple(tuple(group) for group in groups.values())


def linear_layers(folder: Path) -> dict[str, tuple[int, int]]:
    """The shape of every matrix that an adapter may go with, by its layer's name, from a model folder's headers alone.

    Embeddings and head are told by the vocabulary, positions by their number. Raises `MissingError` as `weight_files`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    tables = {text.get("vocab_size"), text.get("max_position_embeddings"), text.get("n_positions")}
    found = {}
    for name, shape in weight_shapes(folder).items():
        layer, _, leaf = name.rpartition(".")
        is_table = shape[:1] and shape[0] in tables and ("embed" in layer or not _LAYER.search(layer))
        if leaf == "weight" and len(shape) == 2 and not is_table:
            found[layer] = (shape[0], shape[1])
    return found


def target_modules(folder: Path, lora: LoraConfig) -> tuple[str, ...]:
    """The last names of the layers that get an adapter, told without loading the model.

    Raises `ConfigError` for one that no layer has.
    """
    linear = sorted({name.rpartition(".")[2] for name in linear_layers(folder)})
    return _chosen(lora, linear, folder.name)


def _chosen(lora: LoraConfig, linear: Sequence[str], model: str) -> tuple[str, ...]:
    targets = tuple(linear) if lora.target_modules is None else lora.target_modules
    for name in targets:
        if name not in linear:
            raise ConfigError(
                f"lora.target_modules: {name!r} is no linear layer of {model}, or is its head, which is never adapted",
                f"use some of {', '.join(linear)}",
            )
    return targets


def num_parameters(folder: Path, lora: LoraConfig) -> int:
    """The parameters of an adapter: rank x (inputs + outputs) of every layer that gets one. Raises as above."""
    targets = target_modules(folder, lora)
    layers = linear_layers(folder).items()
    return sum(lora.rank * sum(shape) for name, shape in layers if name.rpartition(".")[2] in targets)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no whole model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def write_config(
    folder: Path, lora: LoraConfig, base: str, tensors: Iterable[str], *, transposed: bool = False
) -> None:
    """`adapter_config.json` in peft's form. `base` names the model that the `tensors` adapt, `transposed` says that its
    matrices are stored so."""
    modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> tuple[LoraConfig, str]:
    """The adapter's settings, with its modules spelled out, and what it calls its base. Raises `DataError`."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        lora = LoraConfig(
            rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(sorted(config["target_modules"]))
        )
        return lora, str(config.get("base_model_name_or_path") or "")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no LoRA configuration: {error}", "name a folder that training or peft has written"
        ) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """An adapter's tensors by our names. Raises `DataError`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    try:
        return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", "name another checkpoint") from error


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """`adapter_model.safetensors` with peft's names."""
    from safetensors.torch import save_file

    path = folder / WEIGHTS
    save_file({f"{PREFIX}{n}": t.detach().contiguous().cpu() for n, t in tensors.items()}, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors leaves a file that only its owner can read


def refuse_other_settings(folder: Path, lora: LoraConfig) -> None:
    """Raises `ConfigError` where a folder's adapter has another size or scale than `lora`."""
    saved, _ = read_config(folder)
    for key, own, wanted in (("rank", saved.rank, lora.rank), ("alpha", saved.alpha, lora.alpha)):
        if own != wanted:
            raise ConfigError(
                f"lora.{key} is {wanted}, but the adapter in {folder} has {own}",
                f"set lora.{key} to {own}, or begin without that checkpoint",
            )


def load_into(parameters: Mapping[str, Tensor], folder: Path, lora: LoraConfig) -> None:
    """Copy a folder's adapter into an adapter of the model. Raises `ConfigError` where the folder's settings differ
    from `lora`, and `DataError` for tensors that do not fit."""
    import torch

    refuse_other_settings(folder, lora)
    tensors = read_weights(folder)
    for name in sorted(set(tensors) ^ set(parameters)):
        where = "the file" if name in tensors else "the model"
        raise DataError(
            f"{folder / WEIGHTS}: {name!r} is in {where} only", "set lora.target_modules as it was for that adapter"
        )
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise DataError(
                f"{folder / WEIGHTS}: {name!r} is {tuple(tensors[name].shape)}, not {tuple(parameter.shape)}",
                "name the model that the adapter was trained on",
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
