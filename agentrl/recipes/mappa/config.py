"""What a MAPPA recipe may set: a team declared in YAML, its coach, and how scores become credit.

Source: "Scaling Multiagent Systems with Process Rewards", arXiv 2601.23228, and its published code. Where the two
differ, or the code is at fault, the default is named here: one normalisation per policy, reward = score / 10, return to
go within one action, a coach that does not see the ground truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    BaseRecipe,
    CoachConfig,
    Endpoint,
    EngineConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    Section,
)
from agentrl.errors import ConfigError
from agentrl.recipes.mappa.team import Team, TeamError, plan_team
from agentrl.scoring.quoting import Template


class ReceiveConfig(Section):
    """What an agent is handed of another's work."""

    agent: str = Field(..., description="whose work; it must act before, or in the same loop")
    what: Literal["output", "feedback", "both", "all"] = Field(
        "output", description="its last output, the last tool result, both, or all its turns"
    )
    thinking: bool = Field(False, description="hand its thinking over too")
    max_chars: int | None = Field(None, ge=100, description="longer text is cut in its middle; none: whole")


class LoopConfig(Section):
    """A stretch of the team that repeats. Without a limit there is no loop."""

    agents: tuple[str, ...] = Field(..., min_length=1, description="a stretch of the order, first to last")
    max_rounds: int = Field(..., ge=1)
    until: str | None = Field(None, description="the loop ends when its last agent's output holds this text")


class TeamSamplingConfig(SamplingConfig):
    """The paper's: temperature 1, top-p 1, 4,096 tokens, thinking included."""

    max_tokens: int = Field(4_096, ge=1, description="sampled tokens of one completion at most")


class TeamAgentConfig(AgentConfig):
    """One agent of the team. Order, hand-over and files follow from `after`, `receives`, `must_save`."""

    sampling: TeamSamplingConfig = TeamSamplingConfig()
    max_prompt_tokens: int = Field(24_576, ge=1)
    max_response_tokens: int = Field(16_384, ge=1, description="sampled and tool tokens of one visit, all turns")

    role: str = Field(..., min_length=1, description="what it is for, as its coach is told")
    template: str = Field(
        "{{question}}\n\n{{received}}",
        description="its first user turn: {{question}}, {{received}}, {{files}}, {{loop_round}} or an agent's name",
    )
    after: tuple[str, ...] | None = Field(None, description="agents it waits for; none: the one before it in the list")
    receives: tuple[ReceiveConfig, ...] | None = Field(None, description="none: the last output of those in `after`")
    must_save: tuple[str, ...] = Field((), description="files it has to leave in the workspace")
    needs: tuple[str, ...] = Field((), description="files of earlier agents without which it cannot work")
    collect: tuple[str, ...] = Field((), description="further patterns of files kept in the workspace after each call")


class MappaConfig(Section):
    """How scores become credit. `credit` other than process is a baseline on the same trajectories."""

    kl_coef: float = Field(0.01, ge=0, description="beta of the KL penalty in the reward; 0: no reference is loaded")
    normalise_over: Literal["policy", "agent"] = Field("policy", description="what shares one mean and variance")
    return_to_go: Literal["action", "agent"] = Field(
        "action", description="over the tokens of one action, or over the agent's later actions too"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="return_to_go: agent; discount per later action")
    process_weight: float = Field(1.0, ge=0, description="of an action's score / 10 in its reward")
    outcome_weight: float = Field(0.0, ge=0, description="of the trajectory's outcome (0 to 1) in it")
    mask_truncated: bool = Field(True, description="leave completions cut at their limit out of loss and statistics")
    loss_mean: Literal["token", "sequence"] = Field("token", description="mean over tokens, or over actions")
    credit: Literal["process", "outcome", "grpo", "supervised"] = Field(
        "process", description="baselines: outcome alone, GRPO on it, imitation of what succeeded"
    )
    hindsight: bool = Field(False, description="coach each action again when the trajectory has ended")
    answer_from: str | None = Field(None, description="whose output is the team's answer; none: the last agent's")
    answer_file: str | None = Field(None, description="a file of the workspace whose text is the answer instead")
    eval_score: Literal["outcome", "coach"] = Field(
        "outcome",
        description="what evaluations measure; coach: the mean of the actions' scores, 0 to 10, by calling it",
    )
    eval_trials: int = Field(1, ge=1, description="rollouts per held-out task")


class MappaOptimConfig(OptimConfig):
    """The published run's: cosine to a tenth of the peak rate, no decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="linear and cosine: the last rate over the peak rate")
    mini_batch: int | None = Field(
        16, ge=1, description="contexts of a policy per optimiser step at most, in even parts; none: all in one"
    )


class MappaRolloutConfig(RolloutConfig):
    """The published run's: two rollouts of each of 32 questions."""

    group_size: int = Field(2, ge=1, description="rollouts per question; one is enough, no group is compared")


class MappaRunConfig(RunConfig):
    """The published run's length."""

    steps: int = Field(128, ge=0)


class MappaRecipe(BaseRecipe):
    """A MAPPA recipe: at least one agent, each with a policy of its own or a shared one."""

    group_relative: ClassVar[bool] = False
    refuses_leaks: ClassVar[bool] = True

    method: Literal["mappa"]
    agents: dict[str, TeamAgentConfig]  # type: ignore[assignment]  # narrowed: a team's agents say more
    loops: tuple[LoopConfig, ...] = ()
    coach: CoachConfig
    reward: str | None = Field(None, description="outcome: exact_match, f1, math, choice, code, table, module:function")
    engine: EngineConfig = EngineConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: MappaOptimConfig = MappaOptimConfig()
    rollout: MappaRolloutConfig = MappaRolloutConfig()
    run: MappaRunConfig = MappaRunConfig()
    mappa: MappaConfig = MappaConfig()

    @model_validator(mode="after")
    def _team_is_whole(self) -> MappaRecipe:
        try:
            team = self.team
        except TeamError as error:
            raise ValueError(str(error)) from error
        before = team.before()
        for name, agent in self.agents.items():
            unknown = set(agent.tools) - self.tool_names
            if unknown:
                have = ", ".join(sorted(self.tool_names)) or "none"
                raise ValueError(f"agents.{name}.tools: {sorted(unknown)[0]!r} is not set up under tools ({have})")
            for got in self.receives(name):
                if got.agent not in before[name]:
                    raise ValueError(f"agents.{name}.receives: {got.agent!r} never acts before {name}")
            saved = {file for other in before[name] for file in self.agents[other].must_save}
            for file in agent.needs:
                if file not in saved:
                    raise ValueError(f"agents.{name}.needs: no agent before {name} must save {file!r}")
            _check_template(name, agent, self.received_names(name))
        if self.mappa.answer_from is not None and self.mappa.answer_from not in self.agents:
            raise ValueError(f"mappa.answer_from: there is no agent {self.mappa.answer_from!r}")
        if self.mappa.answer_from is None and len(team.stages[-1].agents) > 1:
            last = ", ".join(team.stages[-1].agents)
            raise ValueError(f"mappa.answer_from: {last} all end the team; name whose output is the answer")
        return self

    @model_validator(mode="after")
    def _no_silent_settings(self) -> MappaRecipe:
        mappa = self.mappa
        unknown = set(self.coach.ground_truth) - set(self.agents)
        if unknown:
            raise ValueError(f"coach.ground_truth: there is no agent {sorted(unknown)[0]!r}")
        if self.algorithm.kl_coef:
            raise ValueError("algorithm.kl_coef: MAPPA's KL stands in the reward; set mappa.kl_coef instead")
        if mappa.gamma != 1.0 and mappa.return_to_go == "action":
            raise ValueError("mappa.gamma: has no effect with mappa.return_to_go: action")
        uses_outcome = mappa.credit != "process" or mappa.outcome_weight > 0
        if uses_outcome and self.reward is None:
            raise ValueError("reward: is needed, because the outcome enters the credit")
        if mappa.credit == "process" and not mappa.process_weight and not mappa.outcome_weight:
            raise ValueError("mappa.process_weight: with mappa.outcome_weight 0 too there is no reward at all")
        if mappa.credit != "process":
            for key in ("process_weight", "outcome_weight"):
                if getattr(mappa, key) != MappaConfig.model_fields[key].default:
                    raise ValueError(f"mappa.{key}: has no effect with mappa.credit: {mappa.credit}")
        if mappa.credit in ("grpo", "supervised"):
            for key in ("return_to_go", "normalise_over", "kl_coef"):
                if getattr(mappa, key) != MappaConfig.model_fields[key].default:
                    raise ValueError(f"mappa.{key}: has no effect with mappa.credit: {mappa.credit}")
        if self.data.eval.path is not None and mappa.eval_score == "outcome" and self.reward is None:
            raise ValueError("reward: is needed to evaluate; set it, or mappa.eval_score: coach")
        if mappa.eval_trials > 1 and self.run.eval_temperature == 0:
            raise ValueError("mappa.eval_trials: greedy trials are all the same; set run.eval_temperature")
        if mappa.answer_file is not None and mappa.answer_from is not None:
            raise ValueError("mappa.answer_from: has no effect with mappa.answer_file")
        if mappa.credit == "grpo" and self.rollout.group_size < 2:
            raise ValueError("rollout.group_size: GRPO compares the rollouts of a question; it needs at least 2")
        return self

    @property
    def team(self) -> Team:
        """Who acts when. Raises `TeamError` for an unknown agent, a cycle without a limit, a loop out of order."""
        after = {name: agent.after for name, agent in self.agents.items()}
        loops = [(loop.agents, loop.max_rounds, loop.until) for loop in self.loops]
        return plan_team(after, loops)

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to a frozen reference stands in the reward."""
        return self.mappa.kl_coef > 0 and self.mappa.credit in ("process", "outcome")

    @property
    def answers(self) -> str:
        """The agent whose output is the team's answer."""
        return self.mappa.answer_from or self.team.stages[-1].agents[-1]

    @property
    def tool_names(self) -> set[str]:
        """Names of the tools that the recipe sets up."""
        built_in = {n for n in ("search", "web", "scholar", "python") if getattr(self.tools, n) is not None}
        return built_in | set(self.tools.custom)

    def receives(self, name: str) -> tuple[ReceiveConfig, ...]:
        """What an agent is handed: its own list, or the last output of every agent it waits for."""
        given = self.agents[name].receives
        if given is not None:
            return given
        return tuple(ReceiveConfig(agent=other) for other in self.team.after[name])

    def received_names(self, name: str) -> tuple[str, ...]:
        """The agents whose work an agent is handed, in order."""
        return tuple(dict.fromkeys(got.agent for got in self.receives(name)))

    def normalisation_groups(self) -> tuple[str, ...]:
        """The names that samples are normalised under."""
        return tuple(self.policy_models) if self.mappa.normalise_over == "policy" else tuple(self.agents)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The coach's service and the search services, with the environment variables of their keys."""
        found = []
        for name, section in (("web", self.tools.web), ("scholar", self.tools.scholar)):
            if section is not None:
                found.append(Endpoint(f"tools.{name}", "", section.api_key_env))
        if self.coach.kind == "endpoint" and self.coach.replay is None:
            found.append(Endpoint("coach", self.coach.base_url or "", self.coach.api_key_env))
        return tuple(found)

    def findings(self) -> list[tuple[str, str, str]]:
        """Functions that are not there, and prompts that leave no room in their budgets."""
        from agentrl.recipes.mappa.findings import findings

        return list(findings(self))

    @classmethod
    def smoke(cls) -> dict[str, Any]:
        """As `smoke_of` for a recipe that names no agent and no policy."""
        return cls.smoke_of({})

    @classmethod
    def smoke_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same team on the embedded model and data, with a coach of rules, two steps long."""
        from agentrl.recipes.mappa.smoke import smoke_overrides

        return smoke_overrides(values)


def _check_template(name: str, agent: TeamAgentConfig, received: tuple[str, ...]) -> None:
    known = ("question", "received", "files", "loop_round", *received)
    required = () if received else ("question",)  # who is handed another's work need not see the task itself
    try:
        template = Template(agent.template, known=known, required=required, key=f"agents.{name}.template")
    except ConfigError as error:
        raise ValueError(f"{error.cause}; {error.fix}") from error
    shown = "received" in template.variables or set(received) <= set(template.variables)
    if received and not shown:
        raise ValueError(f"agents.{name}.template: shows nothing of {', '.join(received)}; add {{{{received}}}}")
