"""`--smoke` for every RecursiveMAS recipe: its graph and prompts on the embedded model, with new links, in two steps.

What would need a GPU, a download, links or a file goes back to its default. An embedded data set stays, since prompts
may name fields of its tasks; other data become the embedded questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentrl.config.schema import (
    DataConfig,
    DatasetConfig,
    EngineConfig,
    LaunchConfig,
    ModelConfig,
    SamplingConfig,
    SearchToolConfig,
)
from agentrl.data import EMBEDDED
from agentrl.recipes.recursivemas.styles import STYLES

MODEL: Mapping[str, Any] = {"name": "smollm2-135m"}
SET = "invented-pages"
CORPUS = "invented"
ROUNDS, STEPS, MAX_TOKENS = 2, 4, 16


def smoke_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of `--smoke`, as nested sections. None brings a key's default back."""
    own = _section(values, "recursivemas")
    agents = _agents(own)
    kept = _text(_section(values, "data"), "path") in EMBEDDED
    return {
        "model": _only(ModelConfig, MODEL),
        "policies": None,
        "agents": {name: _agent() for name in agents},
        "engine": _only(EngineConfig, {"kind": "hf"}),
        "data": _data(_section(values, "data"), kept),
        "tools": _tools(_section(values, "tools")),
        "reward": None if kept else "exact_match",
        "recursivemas": {
            "rounds": min(_number(own.get("rounds"), ROUNDS), ROUNDS),
            "latent_steps": min(_number(own.get("latent_steps"), STEPS), STEPS),
            "links": None,
            "official": None,
            "allow_untrained": True,
            "max_batch": None,
            "decodes": None,
            "train": _train(_section(own, "train"), agents),
        },
        "optim": {"warmup_steps": None},
        "launch": _only(LaunchConfig, {"gpus": 0}),
        "run": {"steps": 2, "eval_every": 0, "save_every": 0, "keep_best": None},
    }


def _agents(own: Mapping[str, Any]) -> tuple[str, ...]:
    """The decoder is the last."""
    style = _text(own, "style") if "style" in own else "sequential_light"
    if style in STYLES:
        graph = STYLES[style].graph
        return (*(a for a in graph.agents if a != graph.decoder), graph.decoder)
    roles, decoder = _section(own, "roles"), _text(own, "decoder")
    return (*(name for name in roles if name != decoder), *([decoder] if decoder in roles else []))


def _agent() -> dict[str, Any]:
    return {"policy": None, "sampling": _only(SamplingConfig, {"temperature": 0.0, "max_tokens": MAX_TOKENS})}


def _data(given: Mapping[str, Any], kept: bool) -> dict[str, Any]:
    held_out = _section(given, "eval")
    if not kept or _text(held_out, "path") not in EMBEDDED:
        path = given["path"] if kept else SET
        held_out = {"path": path, "split": "eval"}
    trained = {"path": given["path"], "split": given.get("split")} if kept else {"path": SET, "split": "train"}
    evaluated = {"path": held_out["path"], "split": held_out.get("split"), "limit": 4}
    return {**_only(DataConfig, trained), "eval": _only(DatasetConfig, evaluated)}


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same tools on the embedded corpus."""
    return {"search": _only(SearchToolConfig, {"corpus": CORPUS, "top_k": 4})} if given.get("search") else {}


def _train(given: Mapping[str, Any], agents: tuple[str, ...]) -> dict[str, Any]:
    read = given.get("form") == "teacher_forced"
    return {
        "inner_steps": 1 if given.get("stage") == "both" else None,
        "batch": 2,
        "micro_batch": None,
        "round_weights": None,
        "one_round_steps": None,
        "hop_steps": None,
        "targets": dict.fromkeys(agents[:-1], "answer") if read else None,
        "max_text_tokens": 64,
    }


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def _text(values: Mapping[str, Any], key: str) -> str:
    """Empty where there is none: what is no text is told by validation."""
    found = values.get(key)
    return found if isinstance(found, str) else ""


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _only(schema: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and every other key of its section back at its default."""
    return dict.fromkeys(schema.model_fields) | dict(given)
