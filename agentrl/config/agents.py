"""Who speaks: models and their adapters, how agents sample, what they may read and write, and the engine below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config.paths import PathText
from agentrl.config.section import Section


class LoraConfig(Section):
    """A low-rank adapter (arXiv 2106.09685): W x becomes W x + (alpha / rank) B A x, and A and B alone are trained.

    B begins at 0, so training begins at the model itself. There is no dropout: the trainer would then score other
    log-probabilities than those that were sampled.
    """

    rank: int = Field(16, ge=1, le=512)
    alpha: int = Field(32, ge=1, description="the adapter's output is scaled by alpha / rank")
    target_modules: tuple[str, ...] | None = Field(
        None, min_length=1, description="last names of the linear layers that get an adapter; none: all but the head"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_dropout(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "dropout" in values:
            raise ValueError("dropout: training would score other log-probabilities than were sampled; leave it out")
        return values


class ModelConfig(Section):
    """A policy's model: a hub id, a folder, or an embedded name (`smollm2-135m`, `tiny-llama`, ...)."""

    name: PathText
    checkpoint: PathText | None = Field(
        None, description="a run, run@step or folder whose weights replace the model's own"
    )
    mode: Literal["full", "lora", "frozen"] = Field(
        "full", description="all weights are trained, an adapter on weights that policies of one model share, or none"
    )
    lora: LoraConfig | None = Field(None, description="mode lora; none: an adapter of rank 16 on every linear layer")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="compute dtype; master weights are float32")

    @model_validator(mode="after")
    def _no_silent_options(self) -> ModelConfig:
        if self.lora is not None and self.mode != "lora":
            raise ValueError(f"lora: has no effect with mode: {self.mode}; set mode: lora, or leave it out")
        return self

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that is trained, if one is."""
        return (self.lora or LoraConfig()) if self.mode == "lora" else None


class SamplingConfig(Section):
    """How one agent samples. top_k 0 and top_p 1.0 mean off."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(256, ge=1, description="sampled tokens of one completion at most")


class ExampleTurn(Section):
    """One turn of a worked example that an agent sees before its task. `tool` is what the environment replied."""

    role: Literal["user", "assistant", "tool"]
    content: str


class AgentConfig(Section):
    """A named role."""

    policy: str = Field("policy", description="which policy the agent samples from")
    prompt: str | None = Field(None, description="the agent's system prompt; none keeps the method's own")
    examples: tuple[ExampleTurn, ...] = Field((), description="worked examples between the system prompt and the task")
    sampling: SamplingConfig = SamplingConfig()
    max_turns: int = Field(1, ge=1)
    max_prompt_tokens: int = Field(4096, ge=1)
    max_response_tokens: int = Field(4096, ge=1, description="sampled and environment tokens after the first prompt")
    tools: tuple[str, ...] = ()


class EngineConfig(Section):
    """The rollout engine. Options of another kind than `kind` are refused."""

    kind: Literal["scripted", "hf", "vllm"] = "vllm"
    deterministic: bool = Field(
        False, description="hf and scripted: batches, order and seeds fixed by the requests' keys"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="none: the policy's compute dtype")
    max_batch: int = Field(64, ge=1, description="hf: sequences generated at once; vllm: max_num_seqs")
    max_model_len: int | None = Field(None, ge=16, description="window in tokens; none: the model's own")
    kv_cache_gib: float | None = Field(None, gt=0, description="vllm on CPU: cache size in GiB (2 when not set)")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="vllm on GPU (0.85 when not set)")
    enforce_eager: bool | None = Field(None, description="vllm only; on CPU always true")
    script: str | None = Field(None, description="scripted: module:function that answers a request with text")

    @model_validator(mode="after")
    def _no_silent_options(self) -> EngineConfig:
        for key, kinds in {
            "kv_cache_gib": ("vllm",),
            "gpu_memory_utilization": ("vllm",),
            "enforce_eager": ("vllm",),
            "script": ("scripted",),
        }.items():
            if getattr(self, key) is not None and self.kind not in kinds:
                raise ValueError(f"{key} has no effect with kind: {self.kind}; it belongs to {', '.join(kinds)}")
        if self.deterministic and self.kind == "vllm":
            raise ValueError("deterministic is not available with kind: vllm; use kind: hf, or drop deterministic")
        return self
