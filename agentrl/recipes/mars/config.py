"""What a MARS recipe may set. Defaults are the paper's setting; where the sources are silent the choice is named.

Source: "MARS: Co-evolving Dual-System Deep Research via Multi-Agent Reinforcement Learning", arXiv 2510.04935.
"""

from __future__ import annotations

from string import Formatter
from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config.schema import (
    AgentConfig,
    BaseRecipe,
    Endpoint,
    EngineConfig,
    JudgeConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    Section,
)
from agentrl.config.section import with_tuples
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2

ANSWER_NOW = "No more tool calls are possible. Give your answer now: <answer>ANSWER</answer>"


def _system2() -> AgentConfig:
    """System 2 of the paper: 3,072 prompt and 28,672 response tokens, 10 turns, temperature 1, top-p 0.95."""
    return AgentConfig(
        sampling=SamplingConfig(temperature=1.0, top_p=0.95, max_tokens=28_672),
        max_turns=10,
        max_prompt_tokens=3_072,
        max_response_tokens=28_672,
    )


def _system1() -> AgentConfig:
    """System 1 of the paper: 23,552 prompt and 8,192 response tokens."""
    return AgentConfig(
        sampling=SamplingConfig(temperature=1.0, top_p=0.95, max_tokens=8_192),
        max_prompt_tokens=23_552,
        max_response_tokens=8_192,
    )


class MarsConfig(Section):
    """The method's own switches. Those under "ablation" are off in MARS itself."""

    call_syntax: Literal["hermes", "tag"] = Field("hermes", description="tag is plain enough for very small models")
    call_grammar: bool = Field(False, description="sample System 2 under the grammar of one call or one answer (tag)")
    max_query_chars: int = Field(120, ge=1, description="longest query under the grammar")
    max_purpose_chars: int = Field(160, ge=1, description="longest purpose under the grammar")
    max_answer_chars: int = Field(120, ge=1, description="longest answer under the grammar")
    enable_thinking: bool | None = Field(None, description="System 2's thinking switch, where the template has one")
    observation_role: Literal["tool", "user"] = Field("tool", description="the chat role of tool results")
    item_template: str = Field("[{index}] {header}\n{text}", description="how System 1 sees one raw result")
    distil_template: str = Field("{items}\n\nPurpose: {purpose}", description="System 1's user turn")
    include_question: bool = Field(False, description="show System 1 the question too; silent in the sources")
    bypass_tokens: int = Field(0, ge=0, description="results of at most so many tokens in all skip System 1; 0 is off")
    error_tokens: int = Field(512, ge=0, description="a tool's error longer than this is distilled like a result")
    answer_reserve: int = Field(1_024, ge=1, description="response tokens kept free for the answer when merging")
    stop_at_tags: bool = Field(
        True, description="a completion ends at its first closing call or answer tag, else at the end token"
    )
    final_answer: bool = Field(True, description="at the turn limit, one last completion without tools")
    answer_now: str = Field(ANSWER_NOW, description="what the environment adds before that; empty adds nothing")
    advantage_std: Literal["unbiased", "population"] = Field("unbiased", description="n-1 as public GRPO code, or n")
    advantage_eps: float = Field(1e-6, ge=0, description="added to the standard deviation")
    # Ablations (specs E4).
    system1: Literal["on", "off"] = Field("on", description="ablation: off gives System 2 the raw results")
    train: Literal["both", "system2", "system1"] = Field("both", description="ablation: whose samples are trained")
    balance: Literal["uniform", "weighted", "none"] = Field("uniform", description="ablation: the draw to G samples")
    sample_first: bool = Field(False, description="ablation: balance before the statistics are taken")
    normalise: Literal["per_role", "joint"] = Field("per_role", description="ablation: one baseline for both roles")
    loss_mean: Literal["sequence", "token"] = Field("sequence", description="ablation: mean over samples or tokens")
    packing: Literal["ffd", "single", "truncate"] = Field(
        "ffd", description="ablation: single is one result a bin, truncate cuts all results to one bin"
    )


class MarsRunConfig(RunConfig):
    """One epoch of the paper's questions."""

    steps: int = Field(158, ge=0)


class MarsRecipe(BaseRecipe):
    """A MARS recipe. System 1 and System 2 sample from one policy unless `policies` names several."""

    method: Literal["mars"]
    agents: dict[str, AgentConfig] = Field(default_factory=lambda: {SYSTEM2: _system2(), SYSTEM1: _system1()})
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig(questions_per_step=32, group_size=16)
    run: MarsRunConfig = MarsRunConfig()
    mars: MarsConfig = MarsConfig()
    reward: str = Field("exact_match", description="exact_match, f1, judge, or module:function of your own")
    judge: JudgeConfig | None = Field(None, description="with reward: judge")

    @model_validator(mode="before")
    @classmethod
    def _fill_roles(cls, data: Any) -> Any:
        """A recipe that sets one key of a role keeps the paper's value of the others."""
        if not isinstance(data, dict):
            return data
        if not isinstance(data.get("agents"), dict):
            return with_tuples(data)
        agents = dict(data["agents"])
        for name, default in ((SYSTEM2, _system2()), (SYSTEM1, _system1())):
            given = agents.get(name)
            if given is None:
                agents[name] = default.model_dump()
            elif isinstance(given, dict):
                sampling = given.get("sampling")
                merged = default.model_dump() | given
                if isinstance(sampling, dict):
                    merged["sampling"] = default.sampling.model_dump() | sampling
                agents[name] = merged
        filled: dict[str, Any] = with_tuples({**data, "agents": agents})
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> MarsRecipe:
        if set(self.agents) != {SYSTEM2, SYSTEM1}:
            odd = sorted(set(self.agents) ^ {SYSTEM2, SYSTEM1})[0]
            raise ValueError(f"agents.{odd}: MARS has exactly the agents {SYSTEM2} and {SYSTEM1}")
        if self.rollout.group_size < 2:
            raise ValueError("rollout.group_size: GRPO compares the rollouts of a question; it needs at least 2")
        mars, s2, s1 = self.mars, self.agents[SYSTEM2], self.agents[SYSTEM1]
        if mars.call_grammar and mars.call_syntax != "tag":
            raise ValueError("mars.call_grammar: needs mars.call_syntax: tag")
        if s1.max_turns != 1:
            raise ValueError("agents.system1.max_turns: System 1 is stateless and speaks once per bin; leave it at 1")
        if s1.tools:
            raise ValueError("agents.system1.tools: System 1 calls no tools; list them under agents.system2.tools")
        _check_effects(mars)
        if not mars.call_grammar and self.algorithm.turned("constrained"):
            raise ValueError("algorithm.constrained: has no effect without mars.call_grammar; leave it out")
        if mars.answer_reserve >= s2.max_response_tokens:
            raise ValueError("mars.answer_reserve: must be smaller than agents.system2.max_response_tokens")
        for key, names in (
            ("item_template", {"index", "header", "text"}),
            ("distil_template", {"items", "purpose", "question"}),
        ):
            _check_template(key, getattr(mars, key), names)
        if ("{question}" in mars.distil_template) != mars.include_question:
            raise ValueError("mars.distil_template: must hold {question} exactly when mars.include_question is true")
        if (self.reward == "judge") != (self.judge is not None):
            raise ValueError("reward: judge needs the section judge, and the section has no effect without it")
        unknown = set(s2.tools) - self.tool_names
        if unknown:
            raise ValueError(f"agents.system2.tools: {sorted(unknown)[0]!r} is not set up under tools")
        return self

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles whose samples may move weights: those that `mars.train` keeps and whose policy is not frozen."""
        speaking = (SYSTEM2, SYSTEM1) if self.mars.system1 == "on" else (SYSTEM2,)
        kept = [role for role in speaking if self.mars.train in ("both", role)]
        return tuple(role for role in kept if self.policy_models[self.agents[role].policy].mode != "frozen")

    @property
    def tool_names(self) -> set[str]:
        """Names of the tools that the recipe sets up."""
        built_in = {n for n in ("search", "web", "scholar", "python") if getattr(self.tools, n) is not None}
        return built_in | set(self.tools.custom)

    @property
    def system2_tools(self) -> tuple[str, ...]:
        """The tools System 2 may call: those it lists, or all that are set up."""
        return self.agents[SYSTEM2].tools or tuple(sorted(self.tool_names))

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The judge and the search services, with the environment variables of their keys."""
        found = []
        for name, section in (("web", self.tools.web), ("scholar", self.tools.scholar)):
            if section is not None:
                found.append(Endpoint(f"tools.{name}", "", section.api_key_env))
        if self.judge is not None and self.judge.replay is None:
            found.append(Endpoint("judge", self.judge.base_url, self.judge.api_key_env))
        return tuple(found)

    def findings(self) -> list[tuple[str, str, str]]:
        """A reward that cannot be had, and prompts that leave no room in their budgets."""
        from agentrl.recipes.mars.findings import findings

        return list(findings(self))

    @classmethod
    def smoke(cls) -> dict[str, Any]:
        """The same method on the embedded model, data and tools, two steps long."""
        from agentrl.recipes.mars.smoke import smoke_overrides

        return smoke_overrides()


def _check_effects(mars: MarsConfig) -> None:
    """Refuse switches that change nothing beside the others. Raises `ValueError` with the key.

    System 1's own texts may stay with `system1: off`: an arm is the same recipe with one switch turned.
    """
    changed = {name for name in MarsConfig.model_fields if mars.turned(name)}
    dead: list[tuple[bool, tuple[str, ...], str]] = [
        (
            mars.system1 == "off",
            ("train", "balance", "sample_first", "normalise", "packing", "bypass_tokens", "error_tokens"),
            "with mars.system1: off; only System 2 speaks",
        ),
        (mars.train == "system2", ("balance", "sample_first"), "with mars.train: system2; System 1 is not trained"),
        (mars.balance == "none", ("sample_first",), "with mars.balance: none"),
        (not mars.final_answer, ("answer_now",), "with mars.final_answer: false"),
        (mars.call_grammar, ("stop_at_tags",), "with mars.call_grammar: the grammar ends the completion"),
        (
            not mars.call_grammar,
            ("max_query_chars", "max_purpose_chars", "max_answer_chars"),
            "without mars.call_grammar",
        ),
    ]
    for holds, keys, why in dead:
        for key in keys:
            if holds and key in changed:
                raise ValueError(f"mars.{key}: has no effect {why}")
    if mars.sample_first and mars.balance == "weighted":
        raise ValueError("mars.balance: weighted draws by advantages, which mars.sample_first has not computed yet")


def _check_template(key: str, template: str, names: set[str]) -> None:
    try:
        found = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"mars.{key}: {error}; write a literal brace twice") from error
    fields = set(found)
    needed = names - {"index", "header", "question"}
    if fields - names:
        raise ValueError(f"mars.{key}: unknown field {sorted(fields - names)[0]!r}, there are {sorted(names)}")
    if needed - fields:
        raise ValueError(f"mars.{key}: the field {{{sorted(needed - fields)[0]}}} is missing")
    if found.count("items") > 1:
        raise ValueError(f"mars.{key}: {{items}} may stand once; a bin is as large as System 1's prompt")
