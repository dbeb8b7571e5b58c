"""How links are trained: stages, forms of the loss and starts, and the published run's optimiser.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917; where text and released code differ, the code.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.schema import OptimConfig, RunConfig, Section
from agentrl.config.training import Beta

OuterForm = Literal["rollout", "first_step", "teacher_forced"]
Start = Literal["random", "matched", "aligned"]
Stage = Literal["inner", "outer"]


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
    hop_steps: int = Field(
        0,
        ge=0,
        description="outer: so many first steps add, for every agent that hears others, the cross-entropy of its own "
        "known text: each link learns its own hop",
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
        silent: tuple[str, ...]
        if self.stage == "inner":
            silent = (
                "form",
                "inner_too",
                "checkpointed",
                "round_weights",
                "one_round_steps",
                "hop_steps",
                "leak_probe",
            )
        else:
            silent = ("mse_weight", "inner_slots") if self.stage == "outer" else ()
        for key in silent:
            if self.turned(key):
                raise ValueError(f"{key}: has no effect with stage: {self.stage}")
        if self.targets is not None and self.stage == "outer" and self.form != "teacher_forced" and not self.hop_steps:
            raise ValueError(f"targets: has no effect with form: {self.form}, which reads no known text")
        if self.hop_steps and self.form == "teacher_forced":
            raise ValueError("hop_steps: with form: teacher_forced agents read their known texts, and say nothing")
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

    def hops_at(self, step: int) -> bool:
        """Whether an outer step trains what each hearing agent says as well."""
        return step - (self.inner_steps or 0) <= self.hop_steps


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
    # None, so that a temperature that is written down is told from one that is left out, 0 too.
    eval_temperature: float | None = Field(  # type: ignore[assignment]
        None, ge=0, description="has no effect here; set sampling.temperature of the decoder"
    )
