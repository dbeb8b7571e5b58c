"""What every recipe may set: the typed sections that all methods share.

Defaults are the paper's setting wherever the methods agree; a method's own schema (`recipes/<method>/config.py`)
subclasses `BaseRecipe`, adds its section and its own defaults. Every model is frozen and refuses unknown keys.
A key without effect in the chosen mode is refused by `check_effects`-style validators, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Lt
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen section that refuses unknown keys, and numbers that are none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    def turned(self, key: str) -> bool:
        """Whether a key differs from the section's own default. A resolved recipe names every key, so that a key was
        written down tells nothing."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


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

    name: str
    checkpoint: str | None = Field(None, description="a run, run@step or folder whose weights replace the model's own")
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


class DatasetConfig(Section):
    """Tasks from a file or an embedded set. `columns` maps our names (id, question, answer) to the file's."""

    path: str | None = Field(
        None, description="a .jsonl, .json or .csv file, a folder laid out as DSBench, or the name of an embedded set"
    )
    split: str | None = Field(None, description="embedded sets and DSBench folders only")
    columns: dict[str, str] = Field(default_factory=dict)
    format: str | None = Field(
        None, description="the public benchmark whose rows the file holds, as published (agentrl data list)"
    )
    limit: int | None = Field(None, ge=1, description="the first tasks only")
    sample: int | None = Field(None, ge=1, description="so many tasks, drawn at random by sample_seed")
    sample_seed: int = Field(0, description="the same seed draws the same ids, whatever their order in the file")

    @model_validator(mode="after")
    def _one_way_to_take_fewer(self) -> DatasetConfig:
        if self.sample is not None and self.limit is not None:
            raise ValueError("limit: has no effect with sample; set one of the two")
        if self.sample is None and self.turned("sample_seed"):
            raise ValueError("sample_seed: has no effect without sample; set sample too, or leave it out")
        return self


class DataConfig(DatasetConfig):
    eval: DatasetConfig = DatasetConfig()
    shuffle: bool = True
    stratify: str | None = Field(
        None, description="a column of the tasks, such as kind: each step takes its values in even shares"
    )

    @model_validator(mode="after")
    def _stratum_needs_shuffle(self) -> DataConfig:
        if self.stratify is not None and not self.shuffle:
            raise ValueError("stratify: has no effect with shuffle: false; leave one of the two out")
        return self


class SearchToolConfig(Section):
    """BM25 over a local corpus of JSON lines with `title` and `text`."""

    corpus: str = Field(..., description="a .jsonl file, or the name of an embedded corpus")
    top_k: int = Field(10, ge=1)
    index_dir: str | None = Field(None, description="where the index is kept; none: the user's cache folder")
    timeout_s: float = Field(30.0, gt=0)


class PythonToolConfig(Section):
    """Model-written Python in the sandbox."""

    timeout_s: float = Field(30.0, gt=0)
    memory_mib: int = Field(1024, ge=64)
    workspace_mib: int = Field(
        128, ge=8, description="the program's folder, in memory; one file takes half of it at most"
    )
    max_output_bytes: int = Field(20_000, ge=100)
    max_concurrent: int = Field(4, ge=1)


class WebToolConfig(Section):
    """A web search service whose pages are fetched and handed on whole."""

    api_key_env: str = Field("SERPER_API_KEY", description="environment variable that holds the key")
    top_k: int = Field(10, ge=1)
    timeout_s: float = Field(30.0, gt=0)


class ScholarToolConfig(Section):
    """A search service for papers."""

    api_key_env: str = Field("SERPER_API_KEY", description="environment variable that holds the key")
    top_k: int = Field(10, ge=1)
    timeout_s: float = Field(30.0, gt=0)


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
    record: str | None = Field(None, description="JSON-lines file that every reply is appended to")
    replay: str | None = Field(None, description="such a file: replies come from it and nothing is sent")

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
        if self.api_key_env is not None and self.kind != "endpoint":
            raise ValueError(f"api_key_env: has no effect with kind: {self.kind}")
        for key in ("template", "reply"):
            if self.turned(key) and self.kind not in ("endpoint", "local"):
                raise ValueError(f"{key}: has no effect with kind: {self.kind}")
        if (self.stratum is None) == bool(self.offsets):
            raise ValueError("stratum: goes with offsets; set both, or neither")
        return self


class ToolsConfig(Section):
    search: SearchToolConfig | None = None
    web: WebToolConfig | None = None
    scholar: ScholarToolConfig | None = None
    python: PythonToolConfig | None = None
    custom: dict[str, str] = Field(default_factory=dict, description="name -> module:function that returns a Tool")


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
    dir: str = "runs"
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


class Endpoint(NamedTuple):
    """A service that a recipe talks to: the config key that names it, its OpenAI-compatible base URL ("" for another
    kind of service), and the environment variable that holds its API key (none: no key)."""

    key: str
    url: str
    api_key_env: str | None = None


class BaseRecipe(Section):
    """Sections of every recipe. Methods subclass it and narrow `method`."""

    group_relative: ClassVar[bool] = True
    """Advantages compare the rollouts of one question, so a group needs at least two."""

    trains_models: ClassVar[bool] = True
    """Policies of mode full and lora are trained. A method that trains something else has each frozen model once."""
    refuses_leaks: ClassVar[bool] = False
    """A held-out problem among the training ones ends a run, instead of being warned of."""

    text_budgets: ClassVar[bool] = True
    """Agents keep to `max_prompt_tokens` and `max_response_tokens`, so these must fit their model's window."""

    method: str
    model: ModelConfig | None = None
    policies: dict[str, ModelConfig] = Field(default_factory=dict)
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    engine: EngineConfig = EngineConfig()
    data: DataConfig = DataConfig()
    tools: ToolsConfig = ToolsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    rollout: RolloutConfig = RolloutConfig()
    launch: LaunchConfig = LaunchConfig()
    run: RunConfig

    @classmethod
    def smoke(cls) -> dict[str, Any]:
        """Overrides of `--smoke`: the same recipe on the embedded model, data and tools, in a few steps."""
        raise TypeError(f"{cls.__name__} has no smoke form")

    @classmethod
    def smoke_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same, for a method whose overrides follow from the recipe's own `values` (its names of agents)."""
        return cls.smoke()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The judge, coach and tool services of this recipe, for `check`."""
        return ()

    def findings(self) -> list[tuple[str, str, str]]:
        """What the method itself has to say in `check`: (level, dotted key, "cause; fix"). Levels are error, missing
        (something that this machine lacks), warning and info."""
        return []

    @model_validator(mode="after")
    def _one_model_form(self) -> BaseRecipe:
        if (self.model is None) == (not self.policies):
            raise ValueError("name one model, or policies (name -> model), not both and not neither")
        if self.model is not None and any(a.policy != "policy" for a in self.agents.values()):
            raise ValueError("with `model:` there is one policy, called 'policy'; use `policies:` for several")
        for name, agent in self.agents.items():
            if agent.policy not in self.policy_models:
                raise ValueError(f"agents.{name}.policy: {agent.policy!r} is not among {sorted(self.policy_models)}")
        unused = set(self.policies) - {agent.policy for agent in self.agents.values()}
        if self.agents and unused:
            raise ValueError(f"policies.{sorted(unused)[0]}: no agent samples from it; name it in an agent's policy")
        if self.launch.address is not None and self.engine.kind != "vllm":
            raise ValueError(f"launch.address: has no effect with engine.kind: {self.engine.kind}; leave it out")
        return self

    @property
    def questions_per_step(self) -> tuple[str, int]:
        """How many questions a training step takes, behind the key that says so."""
        return "rollout.questions_per_step", self.rollout.questions_per_step

    @property
    def needs_reference(self) -> bool:
        """Whether training asks a frozen copy of where each policy began."""
        return self.algorithm.kl_coef > 0

    @property
    def policy_models(self) -> dict[str, ModelConfig]:
        """Policy name -> model. One `model:` is the policy called "policy"."""
        return dict(self.policies) if self.model is None else {"policy": self.model}
