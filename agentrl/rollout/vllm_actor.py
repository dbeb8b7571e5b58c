"""What runs in the engine's own process: the Ray actor around vLLM's `AsyncLLM`.

The actor is the authority on the policy version: it counts what it has loaded, and every output carries the count.
Requests and outputs are plain dicts, so that the driver needs no vLLM and a fault crosses processes as text.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

_TAIL_BYTES = 4000
# The end of a traceback, but not of one that only says that another process has died.
_TELLING = re.compile(r"(?<!EngineDead)(Error|Exception|Killed)\b: ")


class VLLMActor:
    """The engine of one policy, or of those that are adapters on one model. The driver makes it a Ray actor; all its
    methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._versions: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._loading: set[str] = set()
        self._adapters: dict[str, Any] = {}
        self._count = 0
        self._adapter_count = 0

    async def pid(self) -> int:
        """Of this process. Answering also shows that the actor was placed."""
        return os.getpid()

    async def start(self, fields: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
        """Build the engine from `AsyncEngineArgs` fields. Blocks the actor's loop while the model loads."""
        from agentrl.launch.guard import guard_group

        guard_group()
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
        os.environ.update(environment)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**fields))
        except Exception as fault:  # noqa: BLE001 - crosses processes as text, the driver has no vLLM
            raise RuntimeError(describe(fault, _own_stderr())) from None
        await self._engine.collective_rpc("renew_heads")
        return {"max_model_len": int(self._engine.model_config.max_model_len)}

    async def generate(self, policy: str, given: Any, fields: dict[str, Any]) -> dict[str, Any]:
        """Sample one completion of the `given` token ids or embeddings (L, D), with the policy's adapter if it has one.
        `invalid` in the answer says that vLLM refuses the request itself."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.inputs import EmbedsPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if policy in self._loading:
            raise RuntimeError("a request arrived while weights were being loaded")
        grammar = fields["structured_outputs"]
        version, adapter = self._versions[policy], self._adapters.get(policy)
        self._count += 1
        self._running[policy] += 1
        final = None
        try:
            params = SamplingParams(
                **{**fields, "structured_outputs": StructuredOutputsParams(**grammar) if grammar else None},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            ids = isinstance(given, list)
            prompt = TokensPrompt(prompt_token_ids=given) if ids else EmbedsPrompt(prompt_embeds=given)
            async for output in self._engine.generate(prompt, params, f"request-{self._count}", lora_request=adapter):
                final = output
        except ValueError as fault:
            return {"invalid": str(fault)}
        except Exception as fault:  # noqa: BLE001 - crosses processes as text, the driver has no vLLM
            raise RuntimeError(describe(fault, _own_stderr())) from None
        finally:
            self._running[policy] -= 1
        if final is None or not final.finished:
            raise RuntimeError("vLLM ended a request without an output")
        sampled = final.outputs[0]
        return {
            "ids": list(sampled.token_ids),
            "logprobs": list(sampled.logprobs.logprobs) if sampled.logprobs else [],
            "finish_reason": sampled.finish_reason,
            "policy_version": version,
        }

    async def load(self, policy: str, folder: str, version: int, seed: int) -> dict[str, Any]:
        """Replace the weights by those in `folder`, forget cached prefixes, and compare what is loaded with the files.

        Returns the version now served and the comparison of `WorkerExtension.check_weights`. Raises `RuntimeError`
        when requests keep running: their tokens would come from two policies.
        """
        async with self._exclusive(policy):
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            await self._engine.collective_rpc("renew_heads")
            await self._forget_prefixes()
            report = await self.compare(folder, seed)
        self._versions[policy] = version
        return {"version": version, **report}

    async def load_adapter(self, policy: str, folder: str, version: int) -> dict[str, Any]:
        """Give a policy the adapter in `folder` in place of the one it had, and compare what is loaded with the file.

        Every adapter has a name and an id of its own, by which cached prefixes are told apart, so that none is shared
        with another version or policy. Returns and raises as `load`; other policies' requests may run meanwhile.
        """
        from vllm.lora.request import LoRARequest

        async with self._exclusive(policy):
            self._adapter_count += 1
            adapter = LoRARequest(f"{policy}@{self._adapter_count}", self._adapter_count, folder)
            await self._engine.add_lora(adapter)
            (report,) = await self._engine.collective_rpc("check_adapter", args=(self._adapter_count, folder))
            before = self._adapters.get(policy)
            self._adapters[policy] = adapter
            if before is not None:
                await self._engine.remove_lora(before.lora_int_id)
            wanted = {one.lora_int_id for one in self._adapters.values()}
            if set(await self._engine.list_loras()) != wanted:
                raise RuntimeError(f"vLLM holds the adapters {await self._engine.list_loras()}, not {wanted}")
        self._versions[policy] = version
        return {"version": version, **report}

    @asynccontextmanager
    async def _exclusive(self, policy: str) -> AsyncIterator[None]:
        """No request of the policy runs or begins within the block. A fault in it is told as text."""
        if policy in self._loading:
            raise RuntimeError("weights are being loaded already")
        self._loading.add(policy)
        try:
            await self._settle(policy)
            yield
        except Exception as fault:  # noqa: BLE001 - crosses processes as text, the driver has no vLLM
            raise RuntimeError(describe(fault, _own_stderr())) from None
        finally:
            self._loading.discard(policy)

    async def compare(self, folder: str, seed: int) -> dict[str, Any]:
        """What `WorkerExtension.check_weights` says of the served weights and `folder`."""
        reports: list[dict[str, Any]] = await self._engine.collective_rpc("check_weights", args=(folder, seed))
        (report,) = reports
        return report

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown(timeout=1)  # there is nothing to save; what lingers is killed
            self._engine = None

    async def _settle(self, policy: str) -> None:
        for _ in range(50):
            if not self._running[policy]:
                return
            await asyncio.sleep(0.1)  # a request that the driver has just cancelled is still being ended here
        raise RuntimeError(f"{self._running[policy]} requests are running; weights cannot be replaced under them")

    async def _forget_prefixes(self) -> None:
        for _ in range(50):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)  # blocks of a request that has just ended are not free yet
        raise RuntimeError("the prefix cache did not reset: blocks are still in use")


def describe(fault: BaseException, log: str | None) -> str:
    """One line: the fault, and the last line of the log that names one."""
    text = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
    lines = [line.strip() for line in (log or "").splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)] or lines
    return f"{text}; its log ends: {telling[-1][-300:]}" if telling else text


def _own_stderr() -> str | None:
    """The end of this process's stderr, which its children share, where Ray wrote it to a file."""
    try:
        return Path(os.readlink("/proc/self/fd/2")).read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        return None
