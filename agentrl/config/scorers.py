"""Who scores, where that is a service or a model: judges, coaches, their limits and their cost."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.paths import PathText, path_fault
from agentrl.config.section import Section


class PriceConfig(Section):
    """What calls cost, in US dollars. All 0 means that nothing is metered but tokens."""

    input_per_million: float = Field(0.0, ge=0, description="per million prompt tokens")
    output_per_million: float = Field(0.0, ge=0, description="per million sampled tokens")
    per_call: float = Field(0.0, ge=0, description="per call, whatever its size")


class ScorerConfig(Section):
    """How a judge or a coach is asked: limits on one call and on all of them, cost, record and replay."""

    timeout_s: float = Field(60.0, gt=0, description="of one call, from asking to the last byte")
    max_retries: int = Field(3, ge=0, description="calls after a first that failed or answered out of form")
    backoff_s: float = Field(1.0, ge=0, description="wait before the first retry; doubles, up to 30 s")
    max_concurrent: int = Field(32, ge=1, description="calls in flight at once")
    max_tokens: int = Field(1_024, ge=16, description="sampled tokens of one reply at most")
    temperature: float | None = Field(0.0, ge=0, description="none: not sent, for models that refuse it")
    price: PriceConfig = PriceConfig()
    budget: float | None = Field(None, gt=0, description="US dollars; no call starts that might exceed it")
    record: PathText | None = Field(None, description="JSON-lines file that every reply is appended to")
    replay: PathText | None = Field(None, description="such a file: replies come from it and nothing is sent")

    @model_validator(mode="after")
    def _cost_and_record(self) -> ScorerConfig:
        if self.budget is not None and self.price == PriceConfig():
            raise ValueError("budget: has no effect without a price; set price.input_per_million and the like")
        if self.record is not None and self.replay is not None:
            raise ValueError("replay: sends nothing, so there is nothing to record; set one of record and replay")
        return self


class JudgeConfig(ScorerConfig):
    """An LLM that compares a final answer with the reference, behind an OpenAI-compatible endpoint."""

    model: str
    base_url: str = Field(..., description="for example http://127.0.0.1:8000/v1")
    api_key_env: str | None = Field(None, description="environment variable that holds the key; none: no key")
    tokens_key: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="what the service calls the limit on sampled tokens"
    )
    max_answer_chars: int = Field(4_000, ge=100, description="a longer answer is cut in its middle")
    canaries: bool = Field(True, description="before a run, ask about eight items whose verdicts are known")


class CoachConfig(ScorerConfig):
    """Who scores actions from 0 to 10, and what it is shown of each."""

    kind: Literal["endpoint", "local", "rules", "constant", "random"] = "endpoint"
    model: str | None = Field(None, description="endpoint: the service's name for it; local: as in model.name")
    base_url: str | None = Field(None, description="endpoint: for example http://127.0.0.1:8000/v1")
    api_key_env: str | None = Field(None, description="endpoint: environment variable of the key; none: no key")
    tokens_key: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="endpoint: what the service calls the limit on sampled tokens"
    )
    rules: str | None = Field(None, description="rules: evidence, artifacts, or module:function of your own")
    value: float | None = Field(None, ge=0, le=10, description="constant: the score of every action")
    template: str | None = Field(None, description="endpoint and local: the user's turn, with {{name}} variables")
    reply: Literal["analysis", "score"] = Field(
        "analysis", description="endpoint and local: an analysis before the score, or the score alone"
    )
    max_chars: int = Field(8_000, ge=200, description="longest quoted text; a longer one is cut in its middle")
    ground_truth: tuple[str, ...] = Field((), description="agents whose coach sees the reference; none is agnostic")
    stratum: str | None = Field(None, description="key of a task's info that names its kind, for `offsets`")
    offsets: dict[str, float] = Field(
        default_factory=dict, description="kind of task -> what is added to its scores, as coach-eval advises"
    )

    @model_validator(mode="after")
    def _no_silent_options(self) -> CoachConfig:
        for key, kinds in {
            "model": ("endpoint", "local"),
            "base_url": ("endpoint",),
            "rules": ("rules",),
            "value": ("constant",),
        }.items():
            if (getattr(self, key) is not None) != (self.kind in kinds):
                wrong = "is needed" if self.kind in kinds else "has no effect"
                raise ValueError(f"{key}: {wrong} with kind: {self.kind}")
        if self.kind == "local" and (fault := path_fault(self.model or "")):
            raise ValueError(f"model: {fault}")  # a service's own name for its model need not be a path
        if self.api_key_env is not None and self.kind != "endpoint":
            raise ValueError(f"api_key_env: has no effect with kind: {self.kind}")
        for key in ("template", "reply"):
            if self.turned(key) and self.kind not in ("endpoint", "local"):
                raise ValueError(f"{key}: has no effect with kind: {self.kind}")
        if (self.stratum is None) == bool(self.offsets):
            raise ValueError("stratum: goes with offsets; set both, or neither")
        return self
