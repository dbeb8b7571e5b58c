"""The method's own section, `recursivemas`. A style fills graph, roles and models; a recipe may change or replace them.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917; where text and released code differ, the code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.paths import PathText
from agentrl.config.schema import Section
from agentrl.recipes.recursivemas.graph import Edge, Graph
from agentrl.recipes.recursivemas.prompts import slots_in
from agentrl.recipes.recursivemas.styles import INSTRUCTIONS, STYLES, SYSTEM
from agentrl.recipes.recursivemas.train_config import TrainConfig

StyleName = Literal["sequential_light", "sequential_scaled", "mixture", "distillation", "deliberation", "custom"]
LinkForm = Literal["ln_res", "ln", "paper", "two_layer_res", "two_layer", "one_layer_res", "one_layer"]
Control = Literal["single", "text", "none", "zero", "shuffled"]
NORMED_FORMS = ("ln_res", "ln")
CONTROLS: tuple[Control, ...] = ("single", "text", "none", "zero", "shuffled")


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

    outer: PathText = Field(..., description="the folder with outerlink_config.json")
    inner: dict[str, PathText] = Field(..., description="agent -> the folder with its adapter files")
    task: Literal["math", "code"] = "math"


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
    rounds: int = Field(3, ge=1, le=1000, description="recursion rounds")
    latent_steps: int = Field(32, ge=0, description="latent steps of each rollout; 0: the agents communicate nothing")
    decoder: str | None = Field(None, description="custom: the agent that writes the answer")
    roles: dict[str, RoleConfig] = Field(
        default_factory=dict, description="replaces the style's; all of them if custom"
    )
    edges: tuple[EdgeConfig, ...] = Field((), description="custom: the graph")
    answer: Literal["boxed", "choice", "code", "short"] = Field("boxed", description="what {instruction} asks for")
    enable_thinking: bool | None = Field(False, description="the models' thinking switch, where their template has one")
    links: PathText | None = Field(None, description="the folder of trained links, or a run; none: untrained ones")
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
        self._check_hops()
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

    def _check_hops(self) -> None:
        train = self.train
        if not train.hop_steps:
            return
        if not self.hearers:
            raise ValueError("train.hop_steps: has no effect: in those steps nobody but the decoder hears anyone")
        idle = sorted(set(train.targets or ()) - self.hearers)
        if train.stage == "outer" and idle and idle[0] in self.graph.agents:
            raise ValueError(f"train.targets.{idle[0]}: has no effect: no hop is trained on it")

    @property
    def hearers(self) -> frozenset[str]:
        """Agents other than the decoder that think about a block while hops are trained."""
        if not self.train.hop_steps:
            return frozenset()
        graph, rounds = self.graph, self.rounds if self.train.hop_steps > self.train.one_round_steps else 1
        at_work = [(name, r) for r in range(1, rounds + 1) for name in graph.working(r, rounds)]
        return frozenset(name for name, r in at_work if name != graph.decoder and graph.incoming(name, r))

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
