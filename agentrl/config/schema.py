"""What every recipe may set: the typed sections that all methods share.

Defaults are the paper's setting wherever the methods agree; a method's own schema (`recipes/<method>/config.py`)
subclasses `BaseRecipe`, adds its section and its own defaults. Every model is frozen and refuses unknown keys.
A key without effect in the chosen mode is refused by validators, not ignored. The sections lie by theme beside this
file (agents, world, scorers, training); their names are had from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import Field, model_validator

from agentrl.config.agents import (
    AgentConfig,
    EngineConfig,
    ExampleTurn,
    LoraConfig,
    ModelConfig,
    SamplingConfig,
)
from agentrl.config.scorers import (
    CoachConfig,
    JudgeConfig,
    PriceConfig,
    ScorerConfig,
)
from agentrl.config.section import Section
from agentrl.config.training import (
    AlgorithmConfig,
    LaunchConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
)
from agentrl.config.world import (
    DataConfig,
    DatasetConfig,
    PythonToolConfig,
    ScholarToolConfig,
    SearchToolConfig,
    ToolsConfig,
    WebToolConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "BaseRecipe",
    "CoachConfig",
    "DataConfig",
    "DatasetConfig",
    "Endpoint",
    "EngineConfig",
    "ExampleTurn",
    "JudgeConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "PriceConfig",
    "PythonToolConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScholarToolConfig",
    "ScorerConfig",
    "SearchToolConfig",
    "Section",
    "ToolsConfig",
    "WebToolConfig",
]


class Endpoint(NamedTuple):
    """A service that a recipe talks to: the config key that names it, its OpenAI-compatible base URL ("" for another
    kind of service), and the environment variable that holds its API key (none: no key)."""

    key: str
    url: str
    api_key_env: str | None = None


class BaseRecipe(Section):
    """Sections of every recipe. Methods subclass it and narrow `method`."""

    group_relative: ClassVar[bool] = True
    """Advantages compare the rollouts of one question, so a group needs at least two."""

    trains_models: ClassVar[bool] = True
    """Policies of mode full and lora are trained. A method that trains something else has each frozen model once."""
    refuses_leaks: ClassVar[bool] = False
    """A held-out problem among the training ones ends a run, instead of being warned of."""

    text_budgets: ClassVar[bool] = True
    """Agents keep to `max_prompt_tokens` and `max_response_tokens`, so these must fit their model's window."""

    method: str
    model: ModelConfig | None = None
    policies: dict[str, ModelConfig] = Field(default_factory=dict)
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    engine: EngineConfig = EngineConfig()
    data: DataConfig = DataConfig()
    tools: ToolsConfig = ToolsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    rollout: RolloutConfig = RolloutConfig()
    launch: LaunchConfig = LaunchConfig()
    run: RunConfig

    @classmethod
    def smoke(cls) -> dict[str, Any]:
        """Overrides of `--smoke`: the same recipe on the embedded model, data and tools, in a few steps."""
        raise TypeError(f"{cls.__name__} has no smoke form")

    @classmethod
    def smoke_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same, for a method whose overrides follow from the recipe's own `values` (its names of agents)."""
        return cls.smoke()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The judge, coach and tool services of this recipe, for `check`."""
        return ()

    def findings(self) -> list[tuple[str, str, str]]:
        """What the method itself has to say in `check`: (level, dotted key, "cause; fix"). Levels are error, missing
        (something that this machine lacks), warning and info."""
        return []

    @model_validator(mode="after")
    def _one_model_form(self) -> BaseRecipe:
        if (self.model is None) == (not self.policies):
            raise ValueError("name one model, or policies (name -> model), not both and not neither")
        if self.model is not None and any(a.policy != "policy" for a in self.agents.values()):
            raise ValueError("with `model:` there is one policy, called 'policy'; use `policies:` for several")
        for name, agent in self.agents.items():
            if agent.policy not in self.policy_models:
                raise ValueError(f"agents.{name}.policy: {agent.policy!r} is not among {sorted(self.policy_models)}")
        unused = set(self.policies) - {agent.policy for agent in self.agents.values()}
        if self.agents and unused:
            raise ValueError(f"policies.{sorted(unused)[0]}: no agent samples from it; name it in an agent's policy")
        if self.launch.address is not None and self.engine.kind != "vllm":
            raise ValueError(f"launch.address: has no effect with engine.kind: {self.engine.kind}; leave it out")
        return self

    @property
    def questions_per_step(self) -> tuple[str, int]:
        """How many questions a training step takes, behind the key that says so."""
        return "rollout.questions_per_step", self.rollout.questions_per_step

    @property
    def needs_reference(self) -> bool:
        """Whether training asks a frozen copy of where each policy began."""
        return self.algorithm.kl_coef > 0

    @property
    def policy_models(self) -> dict[str, ModelConfig]:
        """Policy name -> model. One `model:` is the policy called "policy"."""
        return dict(self.policies) if self.model is None else {"policy": self.model}
