"""The vllm engine: one Ray actor per policy, or for all policies that are adapters on one model, each around vLLM's
asynchronous engine, on CPU or GPU.

Prompts go in and ids come out as token ids. Every sampling value is sent explicitly, the seed is a function of the
run's seed and the request's key, and the policy version in a completion is the actor's own count. There is no sleep:
on CPU vLLM's is a silent no-op. Prompts of embeddings are taken by an engine that was started for them (see
`vllm_embeds`), and never by one that serves adapters: together they crash vLLM on Llama-like models.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.schema import EngineConfig, LoraConfig
from agentrl.errors import ConfigError, EngineError, RunFailedError
from agentrl.grammar import GrammarFactory
from agentrl.launch.cluster import Cluster, reclaim_signals
from agentrl.models.lora import NO_ADAPTERS, Adapter, share_models, zero_adapter
from agentrl.protocols import WeightSource
from agentrl.rollout.engine import end_ids
from agentrl.rollout.faults import PromptTooLongError
from agentrl.rollout.vllm_actor import VLLMActor, describe
from agentrl.rollout.vllm_embeds import has_embeddings, prompt_block, width_of
from agentrl.rollout.vllm_fields import (
    check_output,
    engine_environment,
    engine_fields,
    installed_build,
    local_gpus,
    no_gpu,
    prompt_ids,
    request_seed,
    sampling_fields,
    threads_share,
)
from agentrl.rollout.weight_folder import adapter_folder, weight_folder
from agentrl.types import Completion, Request


class VLLMEngine:
    """Serves policies through vLLM. Implements `agentrl.protocols.Engine`; made by `await VLLMEngine.start(...)`."""

    def __init__(
        self,
        policies: Mapping[str, Path],
        *,
        seed: int,
        cluster: Cluster,
        adapters: Mapping[str, Adapter] = NO_ADAPTERS,
        embeds_dtype: str | None = None,
    ) -> None:
        self.actors: dict[str, Any] = {}
        self._embeds_dtype = embeds_dtype
        self._engines: list[Any] = []
        self._adapters = dict(adapters)
        self._folders = dict(policies)
        self._seed = seed
        self._cluster = cluster
        self._pids: dict[str, int] = {}
        self._windows: dict[str, int] = {}
        self._grammars: dict[str, GrammarFactory] = {}
        self._end_ids = {name: end_ids(folder) for name, folder in policies.items()}
        self._in_flight: Counter[str] = Counter()
        self._closed = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        policies: Mapping[str, Path],
        *,
        dtype: str,
        seed: int,
        threads: int | None = None,
        gpus: int | None = None,
        max_model_len: int | None = None,
        address: str | None = None,
        adapters: Mapping[str, Adapter] = NO_ADAPTERS,
        prompt_embeds: bool = False,
        start_timeout_s: float = 600.0,
        debug: bool = False,
    ) -> VLLMEngine:
        """Start Ray on loopback (or join `address`) and one engine per policy (name -> folder), one after the other.

        Policies among `adapters` share the engine of their folder; each request names its adapter. `dtype` ("float32"
        or "bfloat16") and `max_model_len` count where `config` does not set them. `threads` are the CPU threads of each
        engine (none: all cores for one policy, an equal share for several); `gpus` how many GPUs
        to use (none: all, 0 is for the CPU build only). With `prompt_embeds` prompts may be one block of embeddings;
        `ConfigError` together with adapters. Each phase may take `start_timeout_s`. Raises `MissingError`
        without the packages or the GPU that the installed build needs, and `EngineError` that names the phase when
        the start fails or takes too long. Whatever was started is gone when it raises.
        """
        if prompt_embeds and adapters:
            raise ConfigError("vLLM cannot take prompts of embeddings beside adapters", "use engine.kind: hf")
        build = installed_build()
        if build == "gpu" and address is None and not (local_gpus() if gpus is None else gpus):
            raise no_gpu()
        cluster = await _start_cluster(address, gpus, debug)
        embeds_dtype = (config.dtype or dtype) if prompt_embeds else None
        engine = cls(policies, seed=seed, cluster=cluster, adapters=adapters, embeds_dtype=embeds_dtype)
        groups = share_models(policies, adapters)
        try:
            share, environment = _engine_share(cluster, build, len(groups), threads, debug)
            for group in groups:
                fields = engine_fields(
                    config,
                    policies[group[0]],
                    build=build,
                    dtype=dtype,
                    seed=seed,
                    max_model_len=max_model_len,
                    gpu_share=share,
                    adapters=[adapters[name].lora for name in group if name in adapters],
                    prompt_embeds=prompt_embeds,
                )
                await engine._start_actor(group, fields, environment, share, start_timeout_s)
                await engine._load_first_adapters(group)
        except BaseException:
            # what is still loading a model cannot answer, so nothing is asked
            await engine.close(orderly=False)
            raise
        return engine

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `PromptTooLongError` when the prompt leaves no room in the window,
        `ConfigError` for a request that vLLM cannot serve as it is, `EngineError` when the engine is dead."""
        self._check(request.policy)
        policy, sampling = request.policy, request.sampling
        prompt = self._sent(request)
        length, window = len(prompt), self._windows[policy]
        if length >= window:
            raise PromptTooLongError(length, window)
        grammar = self._grammar(policy) if sampling.grammar is not None else None
        if grammar is not None and sampling.grammar is not None:
            grammar.matcher(sampling.grammar)  # a grammar that does not compile is the user's fault, told here
        fields = sampling_fields(
            sampling,
            seed=request_seed(self._seed, request.key),
            room=window - length,
            end_ids=(*self._end_ids[policy], *(grammar.eos_ids if grammar else ())),
        )
        self._in_flight[policy] += 1
        try:
            out = await self._call(policy, self.actors[policy].generate.remote(policy, prompt, fields), "sampling")
        finally:
            self._in_flight[policy] -= 1
        if "invalid" in out:
            raise ConfigError(f"vLLM refuses a request of {request.key}: {out['invalid']}", "change its sampling")
        check_output(out, policy)
        sampled = tuple(out["ids"])
        constrained = forced = (False,) * len(sampled)
        if grammar is not None and sampling.grammar is not None:
            replay = grammar.replay(sampling.grammar, sampled)
            constrained, forced = tuple(replay.constrained_T.tolist()), tuple(replay.forced_T.tolist())
        return Completion(
            ids=sampled,
            logprobs=tuple(out["logprobs"]),
            constrained=constrained,
            forced=forced,
            finish_reason=out["finish_reason"],
            policy_version=out["policy_version"],
        )

    def _sent(self, request: Request) -> Any:
        """What the actor gets: a list of ids, or a tensor (L, D)."""
        if self._embeds_dtype is None or not has_embeddings(request.prompt):
            return list(prompt_ids(request.prompt))
        import torch

        width = width_of(self._folders[request.policy])
        return prompt_block(request.prompt, width, getattr(torch, self._embeds_dtype))

    async def load_weights(self, policy: str, version: int, source: WeightSource, *, timeout_s: float = 600.0) -> int:
        """Replace a policy's weights, forget cached prefixes, and return the version that the actor now serves.

        Tensors go through a temporary safetensors folder. What the workers then hold is compared with the files (see
        `vllm_worker`). Raises `EngineError` while requests of the policy are in flight, and when anything differs or
        is missing.
        """
        self._check(policy)
        if self._in_flight[policy]:
            raise EngineError(
                f"{self._in_flight[policy]} requests of policy {policy!r} are in flight; its weights cannot change",
                "await every completion before the weight sync",
            )
        if policy in self._adapters:
            lora = self._adapters[policy].lora
            if lora is None:
                raise EngineError(f"policy {policy!r} is a model that others share", "give it weights of its own")
            return await self._load_adapter(policy, version, source, lora, timeout_s)
        with weight_folder(source, self._folders[policy], within=self._cluster.folder) as folder:
            call = self.actors[policy].load.remote(policy, str(folder), version, version ^ self._seed)
            report = await self._call(policy, call, "the weight sync", timeout_s)
        return _confirmed(policy, version, report)

    async def _load_adapter(
        self, policy: str, version: int, source: WeightSource, lora: LoraConfig, timeout_s: float
    ) -> int:
        """The same for an adapter: a new one takes the place of the policy's old one, and no other policy notices."""
        with adapter_folder(source, lora, within=self._cluster.folder) as folder:
            call = self.actors[policy].load_adapter.remote(policy, str(folder), version)
            report = await self._call(policy, call, "the weight sync", timeout_s)
        return _confirmed(policy, version, report)

    async def close(self, *, orderly: bool = True) -> None:
        """End the engines, then the cluster if it is ours. Safe to call twice. `orderly` asks each engine first."""
        if self._closed:
            return
        self._closed = True
        if self._engines:
            import ray

            for actor in self._engines:
                # a dead or stuck actor is killed below; nothing is to be told of it at the end of a run
                if orderly:
                    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                        await asyncio.wait_for(_resolved(actor.close.remote()), 15)
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(actor)
            self._engines.clear()
            self.actors.clear()
        await asyncio.to_thread(self._cluster.close)

    async def _start_actor(
        self,
        group: Sequence[str],
        fields: dict[str, Any],
        environment: Mapping[str, str],
        gpus: float,
        timeout_s: float,
    ) -> None:
        """One engine for the policies of a group."""
        import ray

        # num_cpus 0: Ray's CPU slots place nothing here; the threads are set in the environment.
        remote = ray.remote(VLLMActor).options(num_cpus=0, num_gpus=gpus, max_concurrency=4096, max_restarts=0)
        policy = group[0]
        actor: Any = remote.remote()
        self._engines.append(actor)
        self.actors.update(dict.fromkeys(group, actor))
        pid = await self._call(policy, actor.pid.remote(), "placing the engine's actor", 120)
        self._pids.update(dict.fromkeys(group, pid))
        info = await self._call(policy, actor.start.remote(fields, environment), "loading the model", timeout_s)
        for name in group:
            self._windows[name] = int(info["max_model_len"])

    async def _load_first_adapters(self, group: Sequence[str]) -> None:
        """Those that policies begin with. The model itself is an adapter of zeros: on CPU vLLM gives a request without
        an adapter that of the last slot, when others in its batch have one."""
        for policy in group:
            adapter = self._adapters.get(policy)
            if adapter is None:
                continue
            if adapter.start is not None and adapter.lora is not None:
                await self._load_adapter(policy, 0, WeightSource(folder=adapter.start), adapter.lora, 600)
            else:
                zeros = WeightSource(tensors=zero_adapter(self._folders[policy]))
                await self._load_adapter(policy, 0, zeros, LoraConfig(rank=1, alpha=1), 600)

    async def _call(self, policy: str, ref: Any, phase: str, timeout_s: float | None = None) -> Any:
        import ray

        try:
            return await asyncio.wait_for(_resolved(ref), timeout_s)
        except TimeoutError:
            cause = f"{phase} took more than {timeout_s:g} s"
        except ray.exceptions.RayTaskError as fault:
            cause = f"{phase} failed: {_one_line(fault.cause)}"
        except ray.exceptions.RayError as fault:
            cause = f"{phase} failed: {describe(fault, self._cluster.log_tail(self._pids.get(policy, 0)))}"
        raise EngineError(f"vllm engine of policy {policy!r}: {cause}", "see the cause; rerun with --debug for its log")

    def _check(self, policy: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed", "make a new engine")
        if policy not in self.actors:
            raise EngineError(f"no policy {policy!r} in the engine", f"use one of {sorted(self.actors)}")

    def _grammar(self, policy: str) -> GrammarFactory:
        if policy not in self._grammars:
            self._grammars[policy] = GrammarFactory.from_folder(self._folders[policy])
        return self._grammars[policy]


def _confirmed(policy: str, version: int, report: Mapping[str, Any]) -> int:
    """The version that an engine serves after a sync. Raises `EngineError` unless all of it arrived."""
    names = [*report["missing"], *report["different"]]
    if names or not report["compared"] or report["version"] != version:
        fault = "are on one side only" if report["missing"] else "differ from the source after loading"
        raise EngineError(
            f"policy {policy!r} did not take version {version}: {len(names)} weights {fault}: {names[:3]}",
            "send every parameter of the same model, by its Hugging Face name",
        )
    return int(report["version"])


async def _start_cluster(address: str | None, gpus: int | None, debug: bool) -> Cluster:
    """A started cluster; the process's signals are its own again. Cancelled while it starts, it waits for it and closes
    it: its thread cannot be stopped."""
    start = functools.partial(Cluster.start, address=address, num_gpus=gpus, debug=debug)
    starting = asyncio.create_task(asyncio.to_thread(start))
    try:
        cluster = await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(RunFailedError):  # it did not start, and has cleaned up
            await asyncio.to_thread((await starting).close)
        raise
    if threading.current_thread() is threading.main_thread():
        reclaim_signals()
    return cluster


def _engine_share(
    cluster: Cluster, build: str, num_engines: int, threads: int | None, debug: bool
) -> tuple[float, dict[str, str]]:
    """What each of the engines gets: its share of the GPUs, at most one, and its processes' environment. Raises
    `MissingError` where the build needs a GPU and the cluster has none."""
    num_gpus = cluster.num_gpus if build == "gpu" else 0
    if build == "gpu" and num_gpus == 0:
        raise no_gpu()
    environment = engine_environment(
        build, threads=threads or threads_share(num_engines), bind=num_engines == 1 and threads is None
    )
    environment["VLLM_LOGGING_LEVEL"] = "INFO" if debug else "WARNING"
    return min(1.0, num_gpus / num_engines), environment


async def _resolved(ref: Any) -> Any:
    """The value behind a Ray reference; cancelling the wait cancels the task, and with it vLLM's request."""
    import ray

    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise


def _one_line(fault: BaseException | None) -> str:
    return " ".join(str(fault).split())[:600]
