"""How a run learns: credit to gradient, the optimiser, rollouts per step, processes, and the run itself."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt
from pydantic import Field, model_validator

from agentrl.config.paths import PathText
from agentrl.config.section import Section


class AlgorithmConfig(Section):
    """How credit becomes gradient."""

    clip_eps_low: float = Field(
        0.2, gt=0, description="acts only where old log-probs differ: with several optimiser steps per batch"
    )
    clip_eps_high: float = Field(
        0.2, gt=0, description="acts only where old log-probs differ: with several optimiser steps per batch"
    )
    kl_coef: float = Field(0.0, ge=0, description="0: no reference policy is loaded")
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="k1 in the loss ignores the reference and is refused")
    constrained: Literal["allowed", "full", "mask"] = Field(
        "allowed",
        description="how tokens under a grammar are trained: under their allowed set, the full one, not at all",
    )

    @model_validator(mode="after")
    def _no_silent_options(self) -> AlgorithmConfig:
        if self.kl_coef == 0 and self.turned("kl_estimator"):
            raise ValueError("kl_estimator: has no effect with kl_coef 0; set kl_coef too, or leave it out")
        return self


Beta = Annotated[float, Ge(0), Lt(1)]


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="linear and cosine: the last rate over the peak rate")
    max_tokens_per_row: int = Field(4096, ge=16, description="packed row length; a longer sample has a row of its own")
    logprob_chunk: int = Field(1024, ge=1, description="positions that go through the head at once")
    gradient_checkpointing: bool = False
    share_prefix: bool = Field(True, description="compute a prefix that samples share once per row, where parity holds")
    part_stats_every: int = Field(10, ge=0, description="gradient norm and cosine per part every N steps; 0 is off")

    @model_validator(mode="after")
    def _no_silent_options(self) -> OptimConfig:
        if self.schedule == "constant" and self.turned("min_lr_ratio"):
            raise ValueError("min_lr_ratio: has no effect with schedule: constant; set schedule to linear or cosine")
        return self


class RolloutConfig(Section):
    questions_per_step: int = Field(32, ge=1)
    group_size: int = Field(16, ge=1, description="rollouts per question")
    max_concurrent: int = Field(512, ge=1)


class LaunchConfig(Section):
    gpus: int | None = Field(None, ge=0, description="none: all that are there; 0: CPU")
    address: str | None = Field(None, description="of a running Ray cluster; none starts one on loopback")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of each process; none: all cores, which the ranks share when all compute"
    )
    ranks: int = Field(
        1, ge=1, description="trainer processes; each holds every trained policy and computes its share of each update"
    )


class RunConfig(Section):
    name: str | None = None
    dir: PathText = "runs"
    steps: int = Field(..., ge=0)
    seed: int = 0
    eval_every: int = Field(0, ge=0, description="0: before and after only")
    eval_temperature: float = Field(0.0, ge=0, description="sampling temperature of evaluations; 0 is greedy")
    save_every: int = Field(10, ge=0, description="0: after the last step only")
    keep_last: int = Field(2, ge=1)
    keep_best: bool = Field(False, description="also keep the checkpoint with the best evaluation")
    save_prompt_ids: bool = False

    @model_validator(mode="after")
    def _name_is_a_folder(self) -> RunConfig:
        name = self.name
        if name is None:
            return self
        fix = "choose a plain folder name of at most 200 characters"
        if not name.strip() or name in (".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"name: {name[:60]!r} is not a folder name; {fix}")
        if not name.isprintable():
            raise ValueError(f"name: {name[:60]!r} holds a character that cannot be shown; {fix}")
        if len(name) > 200 or len(name.encode("utf-8", "surrogatepass")) > 240:
            raise ValueError(f"name: {len(name)} characters are too many for a folder name; {fix}")
        return self
