"""`--smoke` for every MAPPA recipe: its own team and tools on the embedded model, data and rules, in two short steps.

What would need a service, a GPU, a download or a file goes back to its default; agents, their order, prompts, tools
and hand-over, who may know the reference, and the method's switches, stay. A recipe's own section `smoke` comes after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentrl.config.schema import (
    CoachConfig,
    DataConfig,
    DatasetConfig,
    EngineConfig,
    LaunchConfig,
    ModelConfig,
    SamplingConfig,
)

MODEL: Mapping[str, Any] = {"name": "smollm2-135m"}
SET, REWARD = "invented-pages", "exact_match"
SETS: Mapping[str, str] = {"math": "arithmetic", "table": "dsbench-sklearn"}
"""The embedded set that a reward of its own kind can grade; every other recipe gets `SET` and `REWARD`."""
MAX_TOKENS = 24
MAX_TURNS = 2
WORLD_TOKENS = 256


def smoke_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of `--smoke`, as nested sections. None brings a key's default back."""
    agents, policies = values.get("agents"), values.get("policies")
    outcome, coach, data = values.get("reward"), values.get("coach"), values.get("data")
    own = isinstance(outcome, str) and outcome in SETS
    name = SETS[str(outcome)] if own else SET
    knows = {key: coach[key] for key in ("ground_truth",) if isinstance(coach, dict) and key in coach}
    mixed = {key: data[key] for key in ("stratify",) if own and isinstance(data, dict) and key in data}
    graded = {} if outcome == "table" else {"answer_file": None}
    return {
        "model": _only(ModelConfig, MODEL) if values.get("model") else None,
        **({"policies": {n: _policy(policies[n]) for n in policies}} if isinstance(policies, dict) else {}),
        "engine": _only(EngineConfig, {"kind": "hf"}),
        "data": {
            **_only(DataConfig, {"path": name, "split": "train", **mixed}),
            "eval": _only(DatasetConfig, {"path": name, "split": "eval", "limit": 4}),
        },
        **({"agents": {n: _agent(agents[n]) for n in agents}} if isinstance(agents, dict) else {}),
        "coach": _only(CoachConfig, {"kind": "rules", "rules": "evidence", **knows}),
        "reward": outcome if own else REWARD if outcome else None,
        "mappa": {**graded, "eval_trials": None, "eval_score": None if outcome else "coach"},
        "optim": {"gradient_checkpointing": None, "warmup_steps": None, "max_tokens_per_row": 1024},
        "rollout": {"questions_per_step": 2, "group_size": 2},
        "launch": _only(LaunchConfig, {"gpus": 0}),
        "run": {"steps": 2, "eval_every": 0, "save_every": 0, "eval_temperature": None, "keep_best": None},
    }


def _policy(given: Any) -> dict[str, Any]:
    """A frozen partner stays frozen, an adapter an adapter."""
    kept = ("mode", "lora")
    return _only(ModelConfig, MODEL) | ({k: given[k] for k in kept if k in given} if isinstance(given, dict) else {})


def _agent(given: Any) -> dict[str, Any]:
    max_turns = given.get("max_turns", 1) if isinstance(given, dict) else 1
    turns = min(MAX_TURNS, max_turns) if isinstance(max_turns, int) else 1  # what is no number is told by validation
    return {
        "sampling": _only(SamplingConfig, {"max_tokens": MAX_TOKENS}),
        "max_turns": turns,
        "max_prompt_tokens": 1_200,
        "max_response_tokens": (MAX_TOKENS + WORLD_TOKENS) * turns,
    }


def _only(schema: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and every other key of its section back at its default."""
    return dict.fromkeys(schema.model_fields) | dict(given)
