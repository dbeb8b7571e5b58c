"""`--smoke` for every MARS recipe: the embedded model, world, tools and grader, and two short steps.

The embedded parts are those of the shipped recipe `mars-embedded`; nothing of it is written down twice. A key that a
recipe sets beside them (a judge, an engine option, a column map, a prompt) goes back to its default, so that any MARS
recipe runs so on a CPU. Its switches of the method (`mars.train`, `mars.packing`, ...), its algorithm and seed stay.
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from agentrl.config.schema import (
    AgentConfig,
    DataConfig,
    DatasetConfig,
    EngineConfig,
    LaunchConfig,
    ModelConfig,
    SamplingConfig,
    SearchToolConfig,
    ToolsConfig,
)
from agentrl.config.shipped import resolve_recipe
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2

EMBEDDED = "mars-embedded"
SHORT: dict[str, Any] = {
    "data": {"eval": {"limit": 16}},
    "rollout": {"questions_per_step": 8, "group_size": 8},
    "run": {"steps": 2, "eval_every": 0, "save_every": 0},
}
# What the embedded texts and the grammar rule out: the switches that would contradict them.
_RESET_MARS = ("include_question", "final_answer", "bypass_tokens", "error_tokens", "stop_at_tags", "enable_thinking")


def smoke_overrides() -> dict[str, Any]:
    """The overrides of `--smoke`, as nested sections. None brings a key's default back."""
    embedded = yaml.safe_load(resolve_recipe(EMBEDDED).read_text(encoding="utf-8"))
    data, tools, agents = embedded["data"], embedded["tools"], embedded["agents"]
    engine = _only(EngineConfig, embedded["engine"])
    engine.pop("deterministic", None)
    return {
        "policies": None,
        "model": _only(ModelConfig, embedded["model"]),
        "engine": engine,
        "data": {
            **_only(DataConfig, data),
            "eval": _only(DatasetConfig, data["eval"] | SHORT["data"]["eval"]),
        },
        "tools": {**_only(ToolsConfig, {}), "search": _only(SearchToolConfig, tools["search"])},
        "agents": {name: _agent(agents[name]) for name in (SYSTEM2, SYSTEM1)},
        "mars": dict.fromkeys(_RESET_MARS) | embedded.get("mars", {}),
        "reward": embedded.get("reward"),
        "judge": None,
        "algorithm": {"constrained": None},
        "optim": {
            "warmup_steps": None,
            "gradient_checkpointing": None,
            **embedded.get("optim", {}),
            "part_stats_every": 1,
        },
        "rollout": SHORT["rollout"],
        "launch": _only(LaunchConfig, {"gpus": 0}),
        "run": SHORT["run"] | {"eval_temperature": None, "keep_best": None},
    }


def _agent(given: dict[str, Any]) -> dict[str, Any]:
    return {**_only(AgentConfig, given), "sampling": _only(SamplingConfig, given["sampling"])}


def _only(schema: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and every other key of its section back at its default."""
    return dict.fromkeys(schema.model_fields) | given
