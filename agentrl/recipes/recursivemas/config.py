"""What a RecursiveMAS recipe may set. A style fills graph, roles and models; a recipe may change or replace them.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917; where text and released code differ, the code.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config.schema import AgentConfig, BaseRecipe, EngineConfig, RunConfig, SamplingConfig, Section
from agentrl.recipes.recursivemas.graph import Edge, Graph
from agentrl.recipes.recursivemas.prompts import slots_in
from agentrl.recipes.recursivemas.styles import INSTRUCTIONS, STYLES, SYSTEM

StyleName = Literal["sequential_light", "sequential_scaled", "mixture", "distillation", "deliberation", "custom"]
LinkForm = Literal["ln_res", "ln", "paper", "two_layer_res", "two_layer", "one_layer_res", "one_layer"]


class EdgeConfig(Section):
    """A directed edge; each has an outer link of its own."""

    source: str
    target: str
    feedback: bool = Field(False, description="its block reaches the target in the next round")
    key: str | None = Field(None, description="the edge's name in official link files (12, 23, 31, el, ...)")


class RoleConfig(Section):
    """What a role hears as its user turn: {question}, {instruction}, {task.KEY} for a further field of the task, and
    {NAME} for the latents of agent NAME."""

    prompt: str
    first: str | None = Field(None, description="the user turn of round 1, for roles that hear feedback later")


class OfficialLinks(Section):
    """Folders of the released link files."""

    outer: str = Field(..., description="the folder with outerlink_config.json")
    inner: dict[str, str] = Field(..., description="agent -> the folder with its adapter files")
    task: Literal["math", "code"] = "math"


class RecursiveConfig(Section):
    """The method's own switches."""

    style: StyleName = "sequential_light"
    rounds: int = Field(3, ge=1, description="recursion rounds")
    latent_steps: int = Field(32, ge=0, description="latent steps of each rollout; 0: the agents communicate nothing")
    decoder: str | None = Field(None, description="custom: the agent that writes the answer")
    roles: dict[str, RoleConfig] = Field(
        default_factory=dict, description="replaces the style's; all of them if custom"
    )
    edges: tuple[EdgeConfig, ...] = Field((), description="custom: the graph")
    answer: Literal["boxed", "choice", "code", "short"] = Field("boxed", description="what {instruction} asks for")
    enable_thinking: bool | None = Field(False, description="the models' thinking switch, where their template has one")
    links: str | None = Field(None, description="the folder of trained links, or a run; none: untrained ones")
    official: OfficialLinks | None = Field(None, description="released link files instead of `links`")
    allow_untrained: bool = Field(False, description="run with links of random weights")
    inner_form: LinkForm = "ln_res"
    outer_form: LinkForm = "ln_res"
    match_norm: bool = Field(
        False, description="rescale link outputs to the receiver's mean token-embedding norm; off in released weights"
    )
    max_batch: int = Field(16, ge=1, description="questions that think together")

    @model_validator(mode="after")
    def _consistent(self) -> RecursiveConfig:
        custom = self.style == "custom"
        for key in ("decoder", "edges"):
            given = bool(getattr(self, key))
            if given != custom:
                what = "is needed" if custom else "has no effect"
                raise ValueError(f"{key}: {what} with style: {self.style}")
        problem = self.graph.problem()
        if problem is not None:
            raise ValueError(problem)
        unknown = sorted(set(self.roles) - set(self.graph.agents))
        if unknown:
            raise ValueError(f"roles.{unknown[0]}: style {self.style} has the roles {', '.join(self.graph.agents)}")
        for name in self.graph.agents:
            self._check_prompts(name)
        if self.inner_form == "ln":
            raise ValueError("inner_form: ln is a form of outer links; use ln_res")
        if self.official is not None:
            self._check_official(self.official)
        return self

    def _check_prompts(self, agent: str) -> None:
        """Every incoming block has exactly one slot, in the prompt of each round that it reaches."""
        first, later = self.prompt_of(agent, 1), self.prompt_of(agent, 2)
        for text, round_number, key in ((first, 1, "first"), (later, 2, "prompt")):
            slots = slots_in(text)
            wanted = [e.source for e in self.graph.incoming(agent, round_number)]
            missing, extra = sorted(set(wanted) - set(slots)), sorted(set(slots) - set(wanted))
            if missing:
                raise ValueError(f"roles.{agent}.{key}: the slot {{{missing[0]}}} is missing")
            if extra:
                raise ValueError(
                    f"roles.{agent}.{key}: {{{extra[0]}}} is no block that {agent} hears in round {round_number}"
                )
            if len(slots) != len(wanted):
                raise ValueError(f"roles.{agent}.{key}: a slot stands there twice")

    def _check_official(self, official: OfficialLinks) -> None:
        if self.links is not None:
            raise ValueError("official: has no effect with links; name one of the two")
        if (self.inner_form, self.outer_form, self.match_norm) != ("ln_res", "ln_res", False):
            raise ValueError("official: released links have the form ln_res and no norm matching")
        keyless = [e.name for e in self.graph.edges if e.key is None]
        if keyless:
            raise ValueError(f"official: edge {keyless[0]} has no key to find its file by")
        if set(official.inner) != set(self.graph.agents):
            odd = sorted(set(official.inner) ^ set(self.graph.agents))[0]
            raise ValueError(f"official.inner.{odd}: name one folder for each of {', '.join(self.graph.agents)}")

    @property
    def graph(self) -> Graph:
        if self.style != "custom":
            return STYLES[self.style].graph
        edges = tuple(Edge(e.source, e.target, e.feedback, e.key) for e in self.edges)
        return Graph(tuple(self.roles), edges, self.decoder or "")

    def prompt_of(self, agent: str, round_number: int) -> str:
        """The user turn of a round, with its fields."""
        role = self.roles.get(agent) or STYLES[self.style].roles[agent]
        first = role.prompt if role.first is None else role.first
        return first if round_number == 1 else role.prompt

    def slots_of(self, agent: str, round_number: int) -> tuple[str, ...]:
        """The agents whose blocks stand in the user turn of a round, in order."""
        return slots_in(self.prompt_of(agent, round_number))

    def system_of(self, agent: str) -> str:
        return SYSTEM if self.style == "custom" else STYLES[self.style].roles[agent].system

    @property
    def instruction(self) -> str:
        return INSTRUCTIONS[self.answer]


def _sampling() -> SamplingConfig:
    """The paper's decoding: temperature 0.6, top-p 0.95, 2000 new tokens (MATH500)."""
    return SamplingConfig(temperature=0.6, top_p=0.95, max_tokens=2000)


class RecursiveRecipe(BaseRecipe):
    """A RecursiveMAS recipe. Models are frozen; agents that name one policy share one loaded model."""

    method: Literal["recursivemas"]
    engine: EngineConfig = EngineConfig(kind="hf")
    run: RunConfig = RunConfig(steps=0, seed=42)
    recursivemas: RecursiveConfig = RecursiveConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_agents(cls, data: Any) -> Any:
        """Agents and models that the recipe leaves out come from the style."""
        if not isinstance(data, dict):
            return data
        own = data.get("recursivemas") or {}
        own = own if isinstance(own, dict) else own.model_dump()
        style, roles = own.get("style", "sequential_light"), own.get("roles") or {}
        known = STYLES[style].roles if style in STYLES else {}
        names = list(known) or list(roles)
        agents = dict(data.get("agents") or {})
        policies = dict(data.get("policies") or {})
        if not data.get("model") and not policies:
            policies = {n: {"name": known[n].model, "mode": "frozen"} for n in names if n in known}
        for name in names:
            agent = agents.get(name, {})
            if isinstance(agent, dict):
                given = agent.get("sampling")
                whole = {"policy": "policy" if data.get("model") else name, **agent}
                if given is None or isinstance(given, dict):
                    whole["sampling"] = _sampling().model_dump() | (given or {})
                agents[name] = whole
        filled: dict[str, Any] = {**data, "agents": agents, **({} if data.get("model") else {"policies": policies})}
        return _tuples(filled)

    @model_validator(mode="after")
    def _fits(self) -> RecursiveRecipe:
        graph = self.recursivemas.graph
        if set(self.agents) != set(graph.agents):
            odd = sorted(set(self.agents) ^ set(graph.agents))[0]
            raise ValueError(f"agents.{odd}: this graph has the agents {', '.join(graph.agents)}")
        for name, model in self.policy_models.items():
            if "mode" in model.model_fields_set and model.mode != "frozen":
                raise ValueError(f"policies.{name}.mode: RecursiveMAS trains links only; models are frozen")
        for key in ("algorithm", "rollout"):
            if key in self.model_fields_set:
                raise ValueError(f"{key}: has no effect; RecursiveMAS has no sampled groups and no advantages")
        if "eval_temperature" in self.run.model_fields_set:
            raise ValueError("run.eval_temperature: has no effect; set sampling.temperature of the decoder")
        if self.run.save_prompt_ids:
            raise ValueError("run.save_prompt_ids: prompts hold latents, which have no ids")
        if self.engine.kind == "scripted":
            raise ValueError("engine.kind: scripted engines have no hidden states; use hf")
        return self

    @property
    def decoder(self) -> AgentConfig:
        return self.agents[self.recursivemas.graph.decoder]


def _tuples(value: Any) -> Any:
    """Lists as tuples all the way down: past a before-validator, strict validation sees Python values, not JSON."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
