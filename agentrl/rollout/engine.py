"""The engine factory, and the fault of a prompt that does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError, MissingError
from agentrl.models.lora import NO_ADAPTERS, AdaptedModel, Adapter, load_into
from agentrl.protocols import Engine
from agentrl.rollout.gate import Gate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from agentrl.rollout.hf_generate import HFPolicy

Device = Literal["cpu", "cuda"]


def make_engine(
    config: EngineConfig,
    policies: Mapping[str, Path],
    *,
    dtype: Literal["float32", "bfloat16"],
    seed: int,
    gate: Gate,
    max_model_len: int | None = None,
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
    device: Device | None = None,
) -> Engine:
    """The engine that `config` names, serving `policies` (name -> folder in Hugging Face layout).

    `dtype` is used where `config.dtype` is not set, `max_model_len` where `config.max_model_len` is not set; without
    either, the window is the model's own. Policies that share a folder still have weights of their own, but for those
    among `adapters`, which share one model. The hf engine computes on `device`; none: on a GPU if there is one. Raises
    `MissingError` for a folder that lacks files and `ConfigError` for a model that the engine cannot serve.
    """
    dtype = config.dtype or dtype
    window = config.max_model_len or max_model_len
    if config.kind == "scripted":
        from agentrl.rollout.scripted import ScriptedEngine, resolve_script

        if config.script is None:
            raise ConfigError("engine.script is not set", "name the script as module:function with kind: scripted")
        return ScriptedEngine.from_folders(
            resolve_script(config.script),
            policies,
            gate=gate,
            deterministic=config.deterministic,
            max_model_len=window,
        )
    from agentrl.rollout.hf import HFEngine

    served, shared = _load_hf(policies, adapters, dtype, device)
    return HFEngine(
        served,
        seed=seed,
        gate=gate,
        deterministic=config.deterministic,
        max_batch=config.max_batch,
        max_model_len=window,
        adapters=shared,
    )


def _load_hf(
    policies: Mapping[str, Path],
    adapters: Mapping[str, Adapter],
    dtype: Literal["float32", "bfloat16"],
    device: Device | None,
) -> tuple[dict[str, HFPolicy], dict[str, AdaptedModel]]:
    """Every policy, those among `adapters` on one model per folder, and those models by policy."""
    bases: dict[Path, tuple[HFPolicy, AdaptedModel]] = {}
    served, shared = {}, {}
    for name, folder in policies.items():
        adapter = adapters.get(name)
        if adapter is None:
            served[name] = load_hf_policy(folder, dtype, device)
            continue
        if folder not in bases:
            policy = load_hf_policy(folder, dtype, device)
            bases[folder] = policy, AdaptedModel(policy.model)
        served[name], shared[name] = bases[folder]
        if adapter.lora is not None:
            parameters = shared[name].add(name, adapter.lora)
            if adapter.start is not None:
                load_into(parameters, adapter.start, adapter.lora)
    return served, shared


def load_hf_policy(folder: Path, dtype: Literal["float32", "bfloat16"], device: Device | None = None) -> HFPolicy:
    """Load a model folder for the hf engine, onto `device`; none: a GPU if there is one."""
    import torch

    from agentrl.grammar import GrammarFactory
    from agentrl.models import load_model
    from agentrl.rollout.hf_generate import HFPolicy

    tokenizer = load_tokenizer(folder)
    on_gpu = device == "cuda" or (device is None and torch.cuda.is_available())
    model = load_model(folder, dtype, device="cuda" if on_gpu else "cpu")
    model.requires_grad_(False)
    grammar = GrammarFactory.from_folder(folder)
    eos_ids = tuple(dict.fromkeys((*grammar.eos_ids, *end_ids(folder))))
    pad_id = model.config.pad_token_id
    return HFPolicy(model, tokenizer, eos_ids, eos_ids[0] if pad_id is None else int(pad_id), grammar)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingError(f"{path} is missing", "prepare the model again: agentrl models prepare NAME")
    return Tokenizer.from_file(str(path))


def end_ids(folder: Path) -> tuple[int, ...]:
    """The end-of-text ids that a model folder names, those of its generation config first."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text("utf-8")).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
