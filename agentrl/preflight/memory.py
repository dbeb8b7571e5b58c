"""Does a run fit this machine? Asked of the sizes in its models' folders; where one is not here, nothing is claimed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from agentrl.config.schema import BaseRecipe, ModelConfig
from agentrl.errors import AgentRLError
from agentrl.launch.devices import GIB, Hardware, Plan
from agentrl.launch.memory import Estimate, ModelSize, estimate
from agentrl.models import count_parameters, find
from agentrl.models.lora import num_parameters

Remark = tuple[Literal["error", "warning", "info"], str, str]
"""Level, message, fix."""


def memory_remarks(recipe: BaseRecipe, placed: Plan, hardware: Hardware, *, trains: bool) -> Iterator[Remark]:
    """The estimate: an error where what is certain exceeds the memory that there is, a warning where the whole does, or
    exceeds what is free."""
    sizes: dict[str, ModelSize] = {}
    for name, model in recipe.policy_models.items():
        try:
            size = model_size(model)
        except AgentRLError:
            size = None  # a model that cannot be read is told of by the checks of models
        if size is None:
            yield "info", f"no estimate: {model.name} is not here, or does not tell its sizes", ""
            return
        sizes[name] = size
    if not sizes:
        return
    on_gpu = placed.device == "cuda"
    first = hardware.gpus[placed.gpus[0]] if on_gpu else None
    needed = estimate(
        recipe,
        sizes,
        trains=trains,
        references=recipe.needs_reference,
        gpu_bytes=None if first is None else first.memory_bytes,
        gpus=max(1, len(placed.gpus)),
        ranks=1 if on_gpu else placed.ranks,
    )
    total = hardware.total_bytes if first is None else first.memory_bytes
    there = "this machine has" if first is None else f"the first GPU ({first.name}) has"
    yield _compare(needed, total, there, free=hardware.memory_bytes if first is None else total)


def _compare(needed: Estimate, total: int, there: str, free: int) -> Remark:
    largest = needed.largest
    about = f"about {_gib(needed.bytes)} are needed"
    most = f"the largest part is {largest.what} ({_gib(largest.bytes)})"
    if needed.certain.bytes > total:
        return "error", f"{about}, {there} {_gib(total)}; {most}", largest.fix
    if needed.bytes > total:
        long = "where prompts are half as long as they may be"
        return "warning", f"{about} {long}, {there} {_gib(total)}; {most}", largest.fix
    if needed.bytes > free:
        return "warning", f"{about}, {_gib(free)} are free now; {most}", f"end other programs, or {largest.fix}"
    return "info", f"{about}, {there} {_gib(total)}; {most}", ""


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def model_size(model: ModelConfig) -> ModelSize | None:
    """A model's sizes by its `config.json` and the headers of its weights; None where it is not here, or where its
    config names none. Raises `MissingError` for files that are broken."""
    folder = find(model.name)
    if folder is None:
        return None
    try:
        return _read(folder, model)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(folder: Path, model: ModelConfig) -> ModelSize:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config

    def first(*names: str) -> int:
        name = next((name for name in names if text.get(name)), names[0])
        return int(text[name])

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    own = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    experts = text.get("moe_intermediate_size")
    wide = experts * text["num_experts_per_tok"] if experts else own
    lora = model.adapter
    return ModelSize(
        place=str(folder),
        parameters=count_parameters(folder),
        vocab=first("vocab_size"),
        hidden=hidden,
        layers=first("num_hidden_layers", "n_layer"),
        intermediate=int(wide),
        kv_width=int(text.get("num_key_value_heads") or heads) * int(text.get("head_dim") or hidden // heads),
        adapter=0 if lora is None else num_parameters(folder, lora),
        begins=None if lora is None else model.checkpoint,
    )
