"""How much memory a run will need, from the sizes of its models alone: pure arithmetic, nothing is loaded.

Everything that stays is summed; of rollouts and updates, which take turns, the larger counts. The numbers per parameter
are exact. What a forward pass keeps is counted for the usual decoder layer (two norms with float32 copies, grouped
attention, gated MLP), prompts are taken to be half as long as they may be. Against measured peaks of small runs the sum
is right within a factor of two (`tests/preflight/test_memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.config.schema import BaseRecipe, ModelConfig

GIB = 1024**3
MASTER, GRADIENT, MOMENTS = 4, 4, 8  # bytes per trained parameter, float32
_RUNTIME = 0.7  # GiB: the interpreter, torch, transformers and the recipe's data
_RANK = 0.6  # GiB: the same in a further trainer process
_VLLM = 2.1  # GiB: a vLLM worker and its engine process on CPU, without weights and cache
_RAY = 0.5  # GiB
_VLLM_SHARE, _VLLM_CACHE = 0.85, 2.0  # what vLLM takes where the recipe does not say
_WINDOW = 8192

Phase = Literal["always", "rollout", "update"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A policy's model. Policies of one `place` read the same files. `kv_width` is the key-value heads times their
    size. `adapter`: parameters of the policy's adapter, `begins`: the adapter that it begins with."""

    place: str
    parameters: int
    vocab: int
    hidden: int
    layers: int
    intermediate: int
    kv_width: int
    adapter: int = 0
    begins: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """`what` needs `bytes`, in a `phase`; `fix` tells how to need less. `guessed`: by how long texts may become."""

    what: str
    bytes: int
    fix: str
    phase: Phase = "always"
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """The parts of a run that share one memory: the host's, or that of the first GPU."""

    parts: tuple[Part, ...]

    @property
    def counted(self) -> tuple[Part, ...]:
        """What is there at the peak: all that stays, and the larger of the phases."""
        sums = {p: sum(part.bytes for part in self.parts if part.phase == p) for p in ("rollout", "update")}
        peak = max(sums, key=lambda phase: sums[phase])
        return tuple(part for part in self.parts if part.phase in ("always", peak))

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.counted)

    @property
    def certain(self) -> Estimate:
        """The parts that the run needs whatever is said in it."""
        return Estimate(tuple(part for part in self.parts if not part.guessed))

    @property
    def largest(self) -> Part:
        return max(self.counted, key=lambda part: part.bytes)


def estimate(
    recipe: BaseRecipe,
    sizes: Mapping[str, ModelSize],
    *,
    trains: bool,
    references: bool,
    gpu_bytes: int | None = None,
    gpus: int = 1,
    ranks: int = 1,
) -> Estimate:
    """What a run needs of the memory that its trainer is in. `trains` is false for a verb that only rolls out,
    `references` says that a frozen reference is asked for, `gpu_bytes` is the memory of the first GPU (None: the run is
    on the CPU), `gpus` over how many vLLM's engines are spread, and `ranks` the trainer processes that share this
    memory."""
    parts: list[Part] = []
    if trains:
        parts += _trainer(recipe, sizes, references=references, ranks=ranks)
        parts += _update(recipe, sizes, ranks=ranks)
    parts += _engine(recipe, sizes, gpu_bytes, gpus)
    if gpu_bytes is None:
        parts.append(Part("the program and its libraries", int((_RUNTIME + _RANK * (ranks - 1)) * GIB), "free memory"))
    return Estimate(tuple(parts))


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _trainer(recipe: BaseRecipe, sizes: Mapping[str, ModelSize], *, references: bool, ranks: int) -> Iterator[Part]:
    """Weights, masters, gradients and moments of every trained policy; ranks beyond the first hold replicas without
    masters and moments. LoRA policies of one model and dtype share its weights."""
    models = _trained(recipe)
    smaller = "name a smaller model, or set mode: lora"
    backbones: dict[tuple[str, str], list[str]] = {}
    begun: dict[tuple[str, str, str | None], list[str]] = {}
    for name, model in models.items():
        size, width = sizes[name], _width(model.dtype)
        if model.mode == "lora":
            backbones.setdefault((size.place, model.dtype), []).append(name)
            whole, fix = size.adapter, "lower lora.rank"
        else:
            whole, fix = size.parameters, smaller
        held = whole * (MASTER + MOMENTS + (width + GRADIENT) * ranks)
        what = "the adapter" if model.mode == "lora" else "the weights"
        yield Part(f"{what} of policy {name!r} in training, with gradients and moments", held, fix)
        begun.setdefault((size.place, model.dtype, size.begins), []).append(name)
    for (_, dtype), names in backbones.items():
        bytes_ = sizes[names[0]].parameters * _width(dtype) * ranks
        yield Part(f"the trainer's model under the adapters of {_names(names)}", bytes_, "name a smaller model")
    for (place, dtype, begins), names in begun.items() if references else ():
        size = sizes[names[0]]
        shared = (place, dtype) in backbones
        whole = (size.adapter if begins else 0) if shared else size.parameters
        if whole:
            fix = "set mode: lora, whose reference is the model that is there anyway"
            yield Part(f"the frozen reference of {_names(names)}", whole * _width(dtype) * ranks, fix)


def _update(recipe: BaseRecipe, sizes: Mapping[str, ModelSize], *, ranks: int) -> Iterator[Part]:
    """What one row of the largest policy keeps for its backward pass, and the head's logits of one chunk."""
    models = _trained(recipe)
    if not models:
        return
    tokens = min(recipe.optim.max_tokens_per_row, _step_tokens(recipe))
    rows = {n: _row(sizes[n], tokens, _width(m.dtype), recipe.optim.gradient_checkpointing) for n, m in models.items()}
    name = max(rows, key=lambda n: rows[n])
    fix = "lower optim.max_tokens_per_row, or set optim.gradient_checkpointing: true"
    yield Part(f"a training row of {tokens} tokens of policy {name!r}", rows[name] * ranks, fix, "update")
    chunk = min(recipe.optim.logprob_chunk, tokens)
    heads = {
        n: 8 * chunk * s.vocab + (0 if _width(m.dtype) == 4 else 4 * s.vocab * s.hidden)
        for n, m in models.items()
        for s in (sizes[n],)
    }
    yield Part(
        f"the head's logits of {chunk} positions", max(heads.values()) * ranks, "lower optim.logprob_chunk", "update"
    )


def _row(size: ModelSize, tokens: int, width: int, checkpointing: bool) -> int:
    norms = 2 * (4 + 2 * width) * size.hidden
    attention = width * (3 * size.hidden + 2 * size.kv_width)
    mlp = 4 * width * size.intermediate
    layer = tokens * (norms + attention + mlp)
    return layer + size.layers * tokens * size.hidden * width if checkpointing else layer * size.layers


def _engine(recipe: BaseRecipe, sizes: Mapping[str, ModelSize], gpu_bytes: int | None, gpus: int) -> Iterator[Part]:
    """The engine's own weights and its cache. A vLLM engine on a GPU takes its share whole, whatever the model: the one
    that the recipe sets, or its part of the default."""
    config, models = recipe.engine, recipe.policy_models
    if config.kind == "scripted":
        return
    groups = _groups(recipe, sizes)
    if config.kind == "vllm" and gpu_bytes is not None:
        engines = math.ceil(len(groups) / gpus)
        share = config.gpu_memory_utilization
        share = _VLLM_SHARE if share is None else share * engines
        what = "vLLM's share of" if engines == 1 else f"the share of {engines} vLLM engines, together"
        yield Part(f"{what} {share:g}", int(share * gpu_bytes), "lower engine.gpu_memory_utilization")
        return
    dtype = config.dtype or next(iter(models.values())).dtype
    width = _width(dtype)
    for names in groups:
        size = sizes[names[0]]
        head = 0 if width == 4 else 4 * size.vocab * size.hidden
        adapters = sum(sizes[n].adapter for n in names)
        bytes_ = (size.parameters + adapters) * width + head
        yield Part(f"the engine's copy of the weights of {_names(names)}", bytes_, "name a smaller model")
    if config.kind == "vllm":
        cache = _VLLM_CACHE if config.kv_cache_gib is None else config.kv_cache_gib
        yield Part("vLLM's cache of keys and values", int(cache * len(groups) * GIB), "lower engine.kv_cache_gib")
        processes = int((_VLLM * len(groups) + _RAY) * GIB)
        yield Part(
            f"the processes of {len(groups)} vLLM engines", processes, "share one model by mode: lora, or use hf"
        )
        return
    rollouts = recipe.rollout
    rows = min(config.max_batch, rollouts.max_concurrent, rollouts.questions_per_step * rollouts.group_size)
    caches = {n: rows * _context(recipe, n) * 2 * s.layers * s.kv_width * width for n, s in sizes.items()}
    what = "the engine's cache of keys and values"
    yield Part(what, max(caches.values()), "lower engine.max_batch", "rollout", guessed=True)


def _groups(recipe: BaseRecipe, sizes: Mapping[str, ModelSize]) -> list[list[str]]:
    """The policies by the model that serves them: LoRA policies, and frozen ones beside them, share one."""
    models = recipe.policy_models
    adapted = {sizes[n].place for n, m in models.items() if m.mode == "lora"}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, model in models.items():
        place = sizes[name].place
        alone = recipe.trains_models and (model.mode == "full" or place not in adapted)
        groups.setdefault((place, name if alone else ""), []).append(name)
    return list(groups.values())


def _trained(recipe: BaseRecipe) -> dict[str, ModelConfig]:
    return {n: m for n, m in recipe.policy_models.items() if recipe.trains_models and m.mode != "frozen"}


def _context(recipe: BaseRecipe, policy: str) -> int:
    """Tokens of a policy's longest context: half of what its prompt may have, and all that it may sample at once."""
    agents = [a for a in recipe.agents.values() if a.policy == policy]
    return max((a.max_prompt_tokens // 2 + a.sampling.max_tokens for a in agents), default=_WINDOW)


def _step_tokens(recipe: BaseRecipe) -> int:
    """Tokens of all samples of a step, at most, when prompts are half as long as they may be."""
    rollouts = recipe.rollout.questions_per_step * recipe.rollout.group_size
    each = [a.max_prompt_tokens // 2 + a.max_response_tokens for a in recipe.agents.values()]
    return max(1, rollouts * max(each, default=_WINDOW))


def _names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
