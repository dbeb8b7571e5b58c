"""The hf engine: transformers models in this process, batched by the gate.

Requests queue until the gate says that nobody can join (or, outside deterministic mode, until a full batch waits),
then one worker thread generates them, so the event loop stays responsive. Requests are ordered by their key, and each
draws from a generator seeded by the run's seed and its key alone: what it samples does not depend on its neighbours,
beyond the rounding of batched arithmetic.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from itertools import groupby
from types import MappingProxyType

import torch

from agentrl.errors import EngineError
from agentrl.grammar import GrammarFactory
from agentrl.models.lora import AdaptedModel
from agentrl.protocols import WeightSource
from agentrl.rollout.faults import PromptTooLongError
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf_attention import use_prefix_attention
from agentrl.rollout.hf_generate import HFPolicy, Row, generate_batch
from agentrl.rollout.hf_head import use_float32_head
from agentrl.rollout.hf_probe import shared_prefix_limit
from agentrl.rollout.hf_weights import copy_parameters, copy_weights
from agentrl.rollout.queue import GateQueue, Pending
from agentrl.types import Completion, Key, Request

NO_ADAPTERS: Mapping[str, AdaptedModel] = MappingProxyType({})


class HFEngine:
    """Serves policies from transformers models. Implements `agentrl.protocols.Engine`.

    `max_model_len` caps the window of every policy; the model's own positions cap it too. With `deterministic`, a
    batch leaves only when every live coroutine of the gate waits. A policy among `adapters` shares its model with
    others: it has the adapter of its name there, or is the bare model, whose weights never change.
    """

    def __init__(
        self,
        policies: Mapping[str, HFPolicy],
        *,
        seed: int,
        gate: Gate,
        deterministic: bool = False,
        max_batch: int = 64,
        max_model_len: int | None = None,
        adapters: Mapping[str, AdaptedModel] = NO_ADAPTERS,
    ) -> None:
        self._policies = {name: _with_grammar(policy) for name, policy in policies.items()}
        self._versions = dict.fromkeys(policies, 0)
        self._computed = dict.fromkeys(policies, 0)
        self._adapters = dict(adapters)
        heads, limits = {}, {}
        for policy in policies.values():
            model = id(policy.model)
            if model not in heads:
                use_prefix_attention(policy.model.eval())
                heads[model] = use_float32_head(policy.model)
                limits[model] = shared_prefix_limit(policy)
        self._heads = {n: heads[id(p.model)] for n, p in policies.items()}
        self._windows = {n: _window(p, max_model_len) for n, p in policies.items()}
        self._share_limits = {n: limits[id(p.model)] for n, p in policies.items()}
        self._seed = seed
        self._max_batch = max_batch
        self._queue: GateQueue[Row] = GateQueue(gate, self._serve, full=None if deterministic else max_batch)
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")

    @property
    def shared_prefix_limits(self) -> Mapping[str, int]:
        """Per policy, the longest row (prompt and completion) whose common prefix is computed once; 0: none."""
        return dict(self._share_limits)

    @property
    def computed(self) -> Mapping[str, int]:
        """Per policy, the forward positions computed so far: padding is not counted, a shared prefix counts once."""
        return dict(self._computed)

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `PromptTooLongError` when the prompt leaves no room in the window,
        `ConfigError` for a grammar that does not compile, and `EngineError` when the engine cannot serve."""
        self._queue.check_serving()
        return await self._queue.submit(self._row(request))

    async def load_weights(self, policy: str, version: int, source: WeightSource) -> int:
        """Copy new weights in place once the running batch is done; returns the version now served. Raises
        `EngineError` at the first name that is missing, unexpected or of another shape."""
        self._queue.check_serving()
        self._policy(policy)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._load, policy, version, source)

    async def close(self) -> None:
        """Refuse what waits, end what runs at its next token, and end the worker thread. Safe to call twice."""
        self._closing.set()
        if await self._queue.close():
            await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)

    def _load(self, policy: str, version: int, source: WeightSource) -> int:
        shared = self._adapters.get(policy)
        if shared is None:
            copy_weights(self._policies[policy].model, source, policy)
            self._heads[policy].refresh()
        elif policy in shared:
            copy_parameters(shared.parameters(policy), source, policy)
        else:
            raise EngineError(f"policy {policy!r} is a model that others share", "give it weights of its own")
        self._versions[policy] = version
        return version

    def _policy(self, name: str) -> HFPolicy:
        if name not in self._policies:
            raise EngineError(f"no policy {name!r} in the engine", f"use one of {sorted(self._policies)}")
        return self._policies[name]

    def _row(self, request: Request) -> Row:
        policy = self._policy(request.policy)
        sampling = request.sampling
        length, window = len(request.prompt), self._windows[request.policy]
        if length == 0:
            raise EngineError(f"the prompt of {request.key} is empty", "give the agent a prompt")
        if length >= window:
            raise PromptTooLongError(length, window)
        max_tokens = min(sampling.max_tokens, window - length)
        assert policy.grammar is not None
        return Row(
            request=request,
            max_tokens=max_tokens,
            uniforms=uniforms(self._seed, request.key, max_tokens),
            stop_ids=frozenset((*policy.eos_ids, *sampling.stop_token_ids)),
            matcher=None if sampling.grammar is None else policy.grammar.matcher(sampling.grammar),
        )

    async def _serve(self, flush: list[Pending[Row]]) -> None:
        """Generate one flush, sub-batch by sub-batch, each answered as it is done."""
        loop = asyncio.get_running_loop()
        for batch in self._split(flush):
            name = batch[0].item.request.policy
            try:
                completions = await loop.run_in_executor(self._worker, self._generate, name, [p.item for p in batch])
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(
                    f"generation broke for policy {name!r}: {type(error).__name__}: {error}",
                    "lower engine.max_batch or engine.max_model_len if memory ran out",
                ) from error
            for pending, completion in zip(batch, completions, strict=True):
                pending.answer(completion)

    def _generate(self, name: str, rows: list[Row]) -> list[Completion]:
        shared = self._adapters.get(name)
        if shared is not None:
            shared.use(name if name in shared else None)
        completions = generate_batch(
            self._policies[name],
            rows,
            self._versions[name],
            share_limit=self._share_limits[name],
            closing=self._closing.is_set,
        )
        self._computed[name] += sum(row.computed for row in rows)
        return completions

    def _split(self, flush: list[Pending[Row]]) -> list[list[Pending[Row]]]:
        """Sub-batches of one policy and agent, of similar prompt length, in an order fixed by the keys."""

        def kind(pending: Pending[Row]) -> tuple[str, int]:
            return (pending.item.request.policy, pending.item.request.key.agent)

        def place(pending: Pending[Row]) -> tuple[int, Key]:
            return (len(pending.item.request.prompt), pending.item.request.key)

        batches = []
        for _, members in groupby(sorted(flush, key=kind), key=kind):
            ordered = sorted(members, key=place)
            batches += [ordered[i : i + self._max_batch] for i in range(0, len(ordered), self._max_batch)]
        return batches


def uniforms(seed: int, key: Key, count: int) -> list[float]:
    """The uniform numbers of a request, one per token: a stable hash of (seed, key) seeds its own generator."""
    digest = hashlib.blake2b(repr((seed, astuple(key))).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.rand(count, generator=generator).tolist()


def _with_grammar(policy: HFPolicy) -> HFPolicy:
    if policy.grammar is not None:
        return policy
    return replace(policy, grammar=GrammarFactory(policy.tokenizer, policy.vocab_size, policy.eos_ids))


def _window(policy: HFPolicy, max_model_len: int | None) -> int:
    config = policy.model.config.get_text_config()
    own = int(config.max_position_embeddings)
    return own if max_model_len is None else min(own, max_model_len)
