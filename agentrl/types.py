"""The values that walk through the house, one type per stage.

Every value is frozen and complete when it is made: its type says how far it has come. A `Task` becomes a
`Trajectory` of `Turn`s (each around one `Action`, the unit of credit), a `ScoredTrajectory`, a `Group`, and then
one `Sample` per stretch of tokens an agent saw as one context. Samples gain log-probabilities (`ScoredSample`)
and credit (`CreditedSample`) before they are packed and trained on.

Standard library only: embeddings are opaque handles that stay with the driver of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal


class MaskReason(StrEnum):
    """Why a token of a sample carries no loss. A token without a reason is trained."""

    PROMPT = "prompt"  # what the agent was given
    WORLD = "world"  # tool results, other agents, the environment, and the wrappers around them
    FORCED = "forced"  # the grammar left one legal choice
    CONSTRAINED = "constrained"  # under a grammar, with `algorithm.constrained: mask`
    REWARD_MISSING = "reward_missing"  # a grader, judge or coach failed
    TRUNCATED = "truncated"  # the completion hit its token limit and the method leaves such out
    FROZEN = "frozen"  # the policy or the role is not trained
    FAILED = "failed"  # the rollout failed before it could be scored


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `references` holds every accepted answer, the canonical one first."""

    id: str
    question: str
    references: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A block of input embeddings inside a prompt. `handle` is a tensor of shape (length, dim) that only the
    in-process driver may read."""

    handle: object
    length: int
    dim: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an agent sees: token ids, or segments of ids and embeddings in order."""

    segments: tuple[tuple[int, ...] | Embeddings, ...]

    @staticmethod
    def of(ids: tuple[int, ...] | list[int]) -> Prompt:
        return Prompt((tuple(ids),))

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids. Raises `ValueError` when the prompt holds embeddings."""
        if len(self.segments) == 1 and isinstance(self.segments[0], tuple):
            return self.segments[0]
        out: list[int] = []
        for segment in self.segments:
            if isinstance(segment, Embeddings):
                raise ValueError("this prompt holds embeddings; it has no plain token ids")
            out.extend(segment)
        return tuple(out)

    def __len__(self) -> int:
        return sum(s.length if isinstance(s, Embeddings) else len(s) for s in self.segments)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on a completion: a regular expression or a JSON schema (as text) for the whole completion."""

    kind: Literal["regex", "json_schema"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every sampling value, always explicit: nothing is taken from a model's generation config.

    `top_k` 0 and `top_p` 1.0 mean off. `temperature` 0.0 means greedy. Generation ends at any of
    `stop_token_ids`, at a `stop` string (both kept in the completion), or after `max_tokens`. A complete grammar
    leaves only the end token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Where a request stands in the run. Keys order requests and seed their random numbers.

    `phase` separates training from evaluation ("train", "eval"); `agent` is the agent's place in the config;
    `g` counts the rollouts of a task; `call` the tool calls of a turn; `bin` the bins of a call.
    """

    phase: str
    step: int
    task: str
    g: int
    turn: int
    agent: int
    call: int = 0
    bin: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    policy: str
    prompt: Prompt
    sampling: Sampling
    key: Key


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled. All per-token fields have the length of `ids`.

    `logprobs` are behaviour log-probabilities: temperature 1, before top-p and top-k, under the grammar's mask.
    `constrained` marks tokens whose allowed set the grammar cut, `forced` those with one legal choice.
    A complete grammar leaves only the end token, which is then forced. `finish_reason`: "stop" (a stop token or
    string was sampled) or "length" (`max_tokens`).
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    constrained: tuple[bool, ...]
    forced: tuple[bool, ...]
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class Action:
    """One completion by one agent: the unit of credit. `text` is a view of the sampled ids, never trained on."""

    agent: str
    request: Request
    completion: Completion
    text: str


@dataclass(frozen=True, slots=True)
class LatentAction:
    """One latent rollout by one agent. Its tensors stay with the run's driver, so it never becomes a sample."""

    agent: str
    steps: int
    positions: int
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """What followed an action: the text the world answered with, and what it cost.

    `items` is the number of raw results behind it, `truncated_tokens` how many of their tokens were cut,
    `error` names the fault when the world refused or failed (`malformed`, `timeout`, ...).
    """

    text: str
    tool: str | None = None
    purpose: str | None = None
    error: str | None = None
    items: int = 0
    truncated_tokens: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """An action, what followed it, and its place.

    `turn` counts the turns of the trajectory, `agent_index` is the agent's place in the config; `call` and `bin`
    place a distilling action under its caller, whose index in the trajectory's turns is `parent`.
    """

    action: Action
    observation: Observation | None
    turn: int
    agent_index: int
    call: int = 0
    bin: int = 0
    parent: int | None = None

    @property
    def order(self) -> tuple[int, int, int, int]:
        return (self.turn, self.agent_index, self.call, self.bin)


TrajectoryStatus = Literal["ok", "truncated", "turn_limit", "failed"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one task: the turns of all agents in canonical order (`Turn.order`), and how it ended.

    `answer` is None when there is none, which is a true 0 and not a missing score. `counts` holds the
    workflow's own counters (tool calls, bins, ...), summed into the step's metrics.
    """

    id: str
    task: Task
    g: int
    turns: tuple[Turn, ...]
    answer: str | None
    status: TrajectoryStatus
    status_reason: str | None = None
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """A value with a reason, or missing (`value` None) with a reason. Missing is never zero."""

    value: float | None
    reason: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        return self.value is None


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory with its outcome and one score, or none, per turn."""

    trajectory: Trajectory
    outcome: Score
    action_scores: tuple[Score | None, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The G scored trajectories of one task."""

    task: Task
    trajectories: tuple[ScoredTrajectory, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Which tokens [start, stop) of a sample one action sampled, and under which grammar and temperature."""

    start: int
    stop: int
    turn_index: int
    temperature: float
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One context as one agent lived it, token for token. All per-token fields have the length of `ids`.

    `reasons[t]` is None exactly where token t is trained (its loss mask). `behaviour[t]` is the engine's
    log-probability of token t, 0.0 at tokens nobody sampled. `group` is the task's id, `part` an opaque label that
    packing keeps apart (MARS: the role). `weight` is 1/parts when a re-rendered trajectory was split.
    """

    id: str
    trajectory_id: str
    group: str
    agent: str
    part: str
    policy: str
    policy_version: int
    ids: tuple[int, ...]
    reasons: tuple[MaskReason | None, ...]
    behaviour: tuple[float, ...]
    constrained: tuple[bool, ...]
    spans: tuple[Span, ...]
    score: Score
    weight: float = 1.0

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        return tuple(r is None for r in self.reasons)

    @property
    def num_trained(self) -> int:
        return sum(r is None for r in self.reasons)


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with the trainer's own log-probabilities before the update, and the reference's if asked for.

    `old` is at the sampling temperature. None means: take the update's own first forward, detached (one optimiser
    step per batch), which is recorded when it has run.
    """

    sample: Sample
    old: tuple[float, ...] | None = None
    reference: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class CreditedSample:
    """A scored sample with one advantage and one weight per token; both 0 where the token is masked.

    The loss is -sum_t weight_t * surrogate_t: every mean (per sequence, per role, over tokens) is in the weights.
    """

    scored: ScoredSample
    advantages: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def sample(self) -> Sample:
        return self.scored.sample
