"""`--smoke` for every MAPPA recipe: its own team and tools on the embedded model, data and rules, in two short steps.

What would need a service, a GPU, a download or a file goes back to its default; agents, their order, prompts, tools
and hand-over, and the method's switches, stay.
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
SET = "invented-pages"
MAX_TOKENS = 24


def smoke_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of `--smoke`, as nested sections. None brings a key's default back."""
    agents, policies = values.get("agents"), values.get("policies")
    outcome = values.get("reward")
    return {
        "model": _only(ModelConfig, MODEL) if values.get("model") else None,
        **({"policies": {name: _policy(policies[name]) for name in policies}} if isinstance(policies, dict) else {}),
        "engine": _only(EngineConfig, {"kind": "hf"}),
        "data": {
            **_only(DataConfig, {"path": SET, "split": "train"}),
            "eval": _only(DatasetConfig, {"path": SET, "split": "eval", "limit": 4}),
        },
        **({"agents": {name: _agent(agents[name]) for name in agents}} if isinstance(agents, dict) else {}),
        "coach": _only(CoachConfig, {"kind": "rules", "rules": "evidence"}),
        "reward": "exact_match" if outcome else None,
        "mappa": {"answer_file": None, "eval_trials": None, "eval_score": None if outcome else "coach"},
        "optim": {"gradient_checkpointing": None, "warmup_steps": None, "max_tokens_per_row": 1024},
        "rollout": {"questions_per_step": 2, "group_size": 2},
        "launch": _only(LaunchConfig, {"gpus": 0}),
        "run": {"steps": 2, "eval_every": 0, "save_every": 0, "eval_temperature": None, "keep_best": None},
    }


def _policy(given: Any) -> dict[str, Any]:
    """A frozen partner stays frozen."""
    return _only(ModelConfig, MODEL) | ({"mode": given["mode"]} if isinstance(given, dict) and "mode" in given else {})


def _agent(given: Any) -> dict[str, Any]:
    max_turns = given.get("max_turns", 1) if isinstance(given, dict) else 1
    return {
        "sampling": _only(SamplingConfig, {"max_tokens": MAX_TOKENS}),
        "max_prompt_tokens": 1_200,
        "max_response_tokens": (MAX_TOKENS + 256) * int(max_turns),
    }


def _only(schema: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and every other key of its section back at its default."""
    return dict.fromkeys(schema.model_fields) | dict(given)
