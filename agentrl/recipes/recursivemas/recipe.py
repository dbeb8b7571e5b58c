"""A whole RecursiveMAS recipe: the shared sections with this method's defaults, and what must fit together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    BaseRecipe,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
)
from agentrl.config.section import with_tuples
from agentrl.recipes.recursivemas.config import RecursiveConfig, ToolLoopConfig
from agentrl.recipes.recursivemas.styles import STYLES
from agentrl.recipes.recursivemas.train_config import LinkOptimConfig, LinkRunConfig

LOOP_TOOLS = ("python", "search")
GRADERS: Mapping[str, str] = MappingProxyType(
    {"boxed": "math", "choice": "choice", "code": "code", "short": "exact_match"}
)


def _sampling() -> SamplingConfig:
    """The paper's decoding: temperature 0.6, top-p 0.95, 2000 new tokens (MATH500)."""
    return SamplingConfig(temperature=0.6, top_p=0.95, max_tokens=2000)


def _frozen(model: Any) -> Any:
    """A model's section with the only mode there is here, unless it names one."""
    if isinstance(model, ModelConfig):
        return model if "mode" in model.model_fields_set else model.model_copy(update={"mode": "frozen"})
    return {"mode": "frozen", **model} if isinstance(model, Mapping) else model


class RecursiveRecipe(BaseRecipe):
    """A RecursiveMAS recipe. Models are frozen; agents that name one policy share one loaded model."""

    group_relative: ClassVar[bool] = False
    trains_models: ClassVar[bool] = False
    text_budgets: ClassVar[bool] = False

    method: Literal["recursivemas"]
    engine: EngineConfig = EngineConfig(kind="hf")
    optim: LinkOptimConfig = LinkOptimConfig()
    run: LinkRunConfig = LinkRunConfig()
    reward: str | None = Field(
        None, description="grader of answers, by name or module:function; none: the one for recursivemas.answer"
    )
    recursivemas: RecursiveConfig = RecursiveConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_agents(cls, data: Any) -> Any:
        """Agents and models that the recipe leaves out come from the style."""
        if not isinstance(data, dict):
            return data
        own = data.get("recursivemas")
        own = own.model_dump() if isinstance(own, RecursiveConfig) else {} if own is None else own
        if not isinstance(own, Mapping):
            return with_tuples(data)  # as below: its own field tells what is wrong with it
        style = own.get("style", "sequential_light")
        sections = (own.get("roles"), data.get("agents"), data.get("policies"))
        if not all(section is None or isinstance(section, Mapping) for section in sections):
            return with_tuples(data)
        roles, agents, policies = (dict(section or {}) for section in sections)
        known = STYLES[style].roles if isinstance(style, str) and style in STYLES else {}
        names = list(known) or list(roles)
        if not data.get("model") and not policies:
            policies = {n: {"name": known[n].model} for n in names if n in known}
        for name in names:
            agent = agents.get(name, {})
            if isinstance(agent, dict):
                given = agent.get("sampling")
                whole = {"policy": "policy" if data.get("model") else name, **agent}
                if given is None or isinstance(given, dict):
                    whole["sampling"] = _sampling().model_dump() | (given or {})
                agents[name] = whole
        models = {"model": _frozen(data["model"])} if data.get("model") else {}
        models |= {"policies": {name: _frozen(model) for name, model in policies.items()}} if policies else {}
        filled: dict[str, Any] = {**data, "agents": agents, **models}
        return with_tuples(filled)

    @model_validator(mode="after")
    def _fits(self) -> RecursiveRecipe:
        graph = self.recursivemas.graph
        if set(self.agents) != set(graph.agents):
            odd = sorted(set(self.agents) ^ set(graph.agents))[0]
            raise ValueError(f"agents.{odd}: this graph has the agents {', '.join(graph.agents)}")
        for name, model in self.policy_models.items():
            if model.mode != "frozen":
                where = "model" if self.model is not None else f"policies.{name}"
                raise ValueError(f"{where}.mode: RecursiveMAS trains links only; models are frozen")
        for key, default in (("algorithm", AlgorithmConfig()), ("rollout", RolloutConfig())):
            if getattr(self, key) != default:
                raise ValueError(f"{key}: has no effect; RecursiveMAS has no sampled groups and no advantages")
        if self.run.turned("eval_temperature"):
            raise ValueError("run.eval_temperature: has no effect; set sampling.temperature of the decoder")
        if self.launch.ranks > 1:
            raise ValueError("launch.ranks: has no effect; links are trained by the driver alone")
        if self.run.save_prompt_ids:
            raise ValueError("run.save_prompt_ids: prompts hold latents, which have no ids")
        if self.recursivemas.decodes > 1 and self.decoder.sampling.temperature == 0:
            raise ValueError("recursivemas.decodes: greedy answers are all the same; raise the decoder's temperature")
        if self.engine.kind == "scripted":
            raise ValueError("engine.kind: scripted engines have no hidden states; use hf")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        """Only the decoder calls tools, and every tool that is set up is one of them."""
        graph, named = self.recursivemas.graph, self.decoder.tools
        for name, agent in self.agents.items():
            if agent.tools and name != graph.decoder:
                raise ValueError(f"agents.{name}.tools: has no effect; only the decoder {graph.decoder} writes calls")
        there = {key for key in type(self.tools).model_fields if getattr(self.tools, key)}
        for key in sorted(there - set(LOOP_TOOLS)):
            raise ValueError(f"tools.{key}: has no effect; the tools of an answer are {', '.join(LOOP_TOOLS)}")
        for key in sorted(there - set(named)):
            raise ValueError(f"tools.{key}: has no effect; add {key} to agents.{graph.decoder}.tools")
        for key in named:
            if key not in there:
                raise ValueError(f"agents.{graph.decoder}.tools: {key!r} is not set up; add a section tools.{key}")
        if not named and self.recursivemas.tool_loop != ToolLoopConfig():
            raise ValueError(f"recursivemas.tool_loop: has no effect; name tools in agents.{graph.decoder}.tools")

    def findings(self) -> list[tuple[str, str, str]]:
        """Links of other models, prompts that no window holds, and graders that are not there."""
        from agentrl.recipes.recursivemas.findings import findings

        return list(findings(self))

    @classmethod
    def smoke(cls) -> dict[str, Any]:
        """As `smoke_of` for a recipe that sets nothing."""
        return cls.smoke_of({})

    @classmethod
    def smoke_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same graph and prompts on the embedded model and data, with new links, two steps long."""
        from agentrl.recipes.recursivemas.smoke import smoke_overrides

        return smoke_overrides(values)

    @property
    def questions_per_step(self) -> tuple[str, int]:
        return "recursivemas.train.batch", self.recursivemas.train.batch if self.run.steps else 0

    @property
    def grader(self) -> str:
        """The name of the reward: the recipe's, or the one that reads the form of answer that was asked for."""
        return self.reward or GRADERS[self.recursivemas.answer]

    @property
    def decoder(self) -> AgentConfig:
        return self.agents[self.recursivemas.graph.decoder]
