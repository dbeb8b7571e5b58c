"""What a RecursiveMAS recipe may set. A style fills graph, roles and models; a recipe may change or replace them.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917; where text and released code differ, the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    BaseRecipe,
    Beta,
    EngineConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    Section,
)
from agentrl.recipes.recursivemas.graph import Edge, Graph
from agentrl.recipes.recursivemas.prompts import slots_in
from agentrl.recipes.recursivemas.styles import INSTRUCTIONS, STYLES, SYSTEM

StyleName = Literal["sequential_light", "sequential_scaled", "mixture", "distillation", "deliberation", "custom"]
LinkForm = Literal["ln_res", "ln", "paper", "two_layer_res", "two_layer", "one_layer_res", "one_layer"]
OuterForm = Literal["rollout", "first_step", "teacher_forced"]
Start = Literal["random", "matched", "aligned"]
Stage = Literal["inner", "outer"]
Control = Literal["single", "text", "none", "zero", "shuffled"]
NORMED_FORMS = ("ln_res", "ln")
CONTROLS: tuple[Control, ...] = ("single", "text", "none", "zero", "shuffled")
LOOP_TOOLS = ("python", "search")
GRADERS: Mapping[str, str] = MappingProxyType(
    {"boxed": "math", "choice": "choice", "code": "code", "short": "exact_match"}
)


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
    system: str | None = Field(None, description="the system turn; none: the style's")


class OfficialLinks(Section):
    """Folders of the released link files."""

    outer: str = Field(..., description="the folder with outerlink_config.json")
    inner: dict[str, str] = Field(..., description="agent -> the folder with its adapter files")
    task: Literal["math", "code"] = "math"


class TrainConfig(Section):
    """How links are trained: inner ones by cosine regression on text, outer ones by the answer after all rounds."""

    stage: Literal["inner", "outer", "both"] = Field("outer", description="both: inner links first, in one run")
    inner_steps: int | None = Field(None, ge=1, description="both: how many of run.steps train the inner links")
    form: OuterForm = Field(
        "rollout",
        description="outer: gradient through all latent steps, through each rollout's first, or the released code's "
        "states at known texts",
    )
    inner_too: bool = Field(False, description="outer: the inner links take the answer's gradient as well")
    start: Start = Field(
        "random",
        description="new links: all weights random, as released; matched: outputs begin with the mean length of token "
        "embeddings; aligned: outer links also begin by passing a token's embedding on (ridge regression)",
    )
    batch: int = Field(4, ge=1, description="questions per optimiser step")
    micro_batch: int | None = Field(
        None, ge=1, description="questions that go through the models together; gradients add up to the batch's"
    )
    checkpointed: bool = Field(
        True, description="outer: compute each forward again in the backward pass: less memory, a third more time"
    )
    round_weights: tuple[float, ...] | None = Field(
        None, description="outer: weight of the answer's loss from each round's prompt; none: the last round alone"
    )
    one_round_steps: int = Field(
        0, ge=0, description="outer: so many first steps unroll one round only, which is cheap; feedback links wait"
    )
    mse_weight: float = Field(0.0, ge=0, description="inner: weight of the mean squared error beside the cosine")
    inner_slots: Literal["empty", "text"] = Field(
        "empty", description="inner: what stands in a prompt's slots: nothing, or the sender's known text"
    )
    targets: dict[str, str] | None = Field(
        None, description="agent -> the column with its known text, or answer; none: the style's columns where there"
    )
    template: str = Field("{answer}", description="the text that the decoder learns to write, around the answer")
    max_text_tokens: int = Field(2048, ge=1, description="a longer known text is cut")
    leak_probe: bool = Field(False, description="train on answers drawn at random, which only a leak can tell")

    @model_validator(mode="after")
    def _no_silent_options(self) -> TrainConfig:
        if (self.inner_steps is None) == (self.stage == "both"):
            what = "is needed" if self.stage == "both" else "has no effect"
            raise ValueError(f"inner_steps: {what} with stage: {self.stage}")
        if self.stage == "inner":
            silent = ("form", "inner_too", "checkpointed", "round_weights", "one_round_steps", "leak_probe")
        else:
            silent = ("mse_weight", "inner_slots") if self.stage == "outer" else ()
        for key in silent:
            if self.turned(key):
                raise ValueError(f"{key}: has no effect with stage: {self.stage}")
        if self.targets is not None and self.stage == "outer" and self.form != "teacher_forced":
            raise ValueError(f"targets: has no effect with form: {self.form}, which reads no known text")
        if self.form == "teacher_forced" and self.micro_batch not in (None, 1):
            raise ValueError("micro_batch: teacher_forced takes one question at a time; leave it out")
        if self.template.count("{answer}") != 1:
            raise ValueError("template: it must hold {answer} once")
        if self.one_round_steps and self.round_weights is not None:
            raise ValueError("one_round_steps: a single round has no weights; leave out round_weights")
        if self.round_weights is not None and not any(self.round_weights):
            raise ValueError("round_weights: all are 0, so nothing would be trained")
        return self

    def stage_of(self, step: int) -> Stage:
        """What step `step` (from 1) trains."""
        if self.stage == "both":
            return "inner" if step <= (self.inner_steps or 0) else "outer"
        return self.stage

    def rounds_of(self, step: int, rounds: int) -> int:
        """How many rounds an outer step unrolls."""
        return 1 if step - (self.inner_steps or 0) <= self.one_round_steps else rounds


class TextTeamConfig(Section):
    """The control `text`: the same graph and prompts, with written messages in the slots (Recursive-TextMAS)."""

    max_tokens: int | None = Field(
        None, ge=1, description="tokens of one message at most; none: the writer's own sampling.max_tokens"
    )
    exact: bool = Field(False, description="every message has max_tokens tokens: no end of text is sampled before")

    @model_validator(mode="after")
    def _exact_needs_a_length(self) -> TextTeamConfig:
        if self.exact and self.max_tokens is None:
            raise ValueError("exact: has no effect without max_tokens; set max_tokens too")
        return self


class SweepConfig(Section):
    """What `agentrl recursivemas sweep` goes through: a training run and an evaluation for each pair. No other verb
    reads it."""

    latent_steps: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="values of m; none: the recipe's own")
    seeds: tuple[int, ...] = Field((), description="values of run.seed; none: the recipe's own")
    by: str | None = Field(None, description="a column of the data: accuracy is told for each of its values")


class ToolLoopConfig(Section):
    """How the decoder's last answer calls tools (the recipe's `tools`, as `agents.DECODER.tools` names them)."""

    max_calls: int = Field(5, ge=1, description="calls of one answer; after the last it is written to its end")
    max_result_chars: int = Field(6000, ge=100, description="a longer result is cut")


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
    sample: str | None = Field(None, description="what infer asks where no question is given; none: the data's first")
    tool_loop: ToolLoopConfig = ToolLoopConfig()
    train: TrainConfig = TrainConfig()
    sweep: SweepConfig = SweepConfig()
    decodes: int = Field(1, ge=1, description="eval: answers sampled from each question's latents; pass@k counts any")
    controls: Literal["all"] | tuple[Control, ...] = Field(
        (),
        description="eval: the same questions answered by the decoder alone, by a text team, with empty slots, with "
        "blocks of zeros, with blocks of other questions",
    )
    text_team: TextTeamConfig = TextTeamConfig()

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
        weights = self.train.round_weights
        if weights is not None and len(weights) != self.rounds:
            raise ValueError(f"train.round_weights: {len(weights)} weights for {self.rounds} rounds")
        if self.rounds == 1 and self.train.one_round_steps:
            raise ValueError("train.one_round_steps: has no effect with rounds: 1")
        odd = sorted(set(self.train.targets or ()) - set(self.graph.agents))
        if odd:
            raise ValueError(f"train.targets.{odd[0]}: style {self.style} has the roles {', '.join(self.graph.agents)}")
        if len(set(self.chosen_controls)) < len(self.chosen_controls):
            raise ValueError("controls: a name stands there twice")
        if self.text_team != TextTeamConfig() and "text" not in self.chosen_controls:
            raise ValueError("text_team: has no effect without the control text; add it to controls")
        if self.graph.decoder in (self.train.targets or {}):
            raise ValueError(
                f"train.targets.{self.graph.decoder}: the decoder's known text is the answer; leave it out"
            )
        if self.inner_form == "ln":
            raise ValueError("inner_form: ln is a form of outer links; use ln_res")
        if self.official is not None:
            self._check_official(self.official)
        self._check_start()
        return self

    def _check_start(self) -> None:
        """A start sets what only some forms have, and what is not set again."""
        start = self.train.start
        if start == "random":
            return
        if start == "matched" and self.match_norm:
            raise ValueError("train.start: matched has no effect with match_norm, which sets the same length; drop one")
        for key, form in (("inner_form", self.inner_form), ("outer_form", self.outer_form)):
            if form not in NORMED_FORMS:
                raise ValueError(
                    f"train.start: {start} sets the last norm, which {key}: {form} does not have; use ln_res"
                )
        if start == "aligned" and self.outer_form == "ln":
            raise ValueError("train.start: aligned sets W3, which outer_form: ln does not have; use ln_res")

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
    def chosen_controls(self) -> tuple[Control, ...]:
        return CONTROLS if self.controls == "all" else self.controls

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
        own = self.roles.get(agent)
        if own is not None and own.system is not None:
            return own.system
        return SYSTEM if self.style == "custom" else STYLES[self.style].roles[agent].system

    @property
    def instruction(self) -> str:
        return INSTRUCTIONS[self.answer]


def _sampling() -> SamplingConfig:
    """The paper's decoding: temperature 0.6, top-p 0.95, 2000 new tokens (MATH500)."""
    return SamplingConfig(temperature=0.6, top_p=0.95, max_tokens=2000)


class LinkOptimConfig(OptimConfig):
    """The published run's: AdamW, cosine to 0 after ten steps of warm-up, no decay."""

    lr: float = Field(5e-4, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(10, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    part_stats_every: int = Field(1, ge=0, description="gradient norm per recursion round every N steps; 0 is off")

    @model_validator(mode="after")
    def _no_rows(self) -> LinkOptimConfig:
        for key in ("max_tokens_per_row", "logprob_chunk", "gradient_checkpointing", "share_prefix"):
            if self.turned(key):
                raise ValueError(
                    f"{key}: has no effect; links are trained on whole questions, checkpointed per rollout"
                )
        return self


class LinkRunConfig(RunConfig):
    """A recipe that only answers questions trains no step."""

    steps: int = Field(0, ge=0)
    seed: int = 42


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
        for key, default in (("algorithm", AlgorithmConfig()), ("rollout", RolloutConfig())):
            if getattr(self, key) != default:
                raise ValueError(f"{key}: has no effect; RecursiveMAS has no sampled groups and no advantages")
        if "eval_temperature" in self.run.model_fields_set:
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


def _tuples(value: Any) -> Any:
    """Lists as tuples all the way down: past a before-validator, strict validation sees Python values, not JSON."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
