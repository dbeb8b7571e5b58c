"""What runs in the engine's own processes: the Ray actor around vLLM's `AsyncLLM`, and the check of its weights.

The actor is the authority on the policy version: it counts what it has loaded, and every output carries the count.
Requests and outputs are plain dicts, so that the driver needs no vLLM and a fault crosses processes as text.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TAIL_BYTES = 4000
_MAX_CHECKED = 32  # linear layers per load; drawn anew each time
_COLUMNS = 4
# The end of a traceback, but not of one that only says that another process has died.
_TELLING = re.compile(r"(?<!EngineDead)(Error|Exception|Killed)\b: ")


class VLLMActor:
    """One policy's engine. The driver makes it a Ray actor; all its methods are coroutines of one event loop."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._version = 0
        self._running = 0
        self._loading = False
        self._count = 0

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
        return {"max_model_len": int(self._engine.model_config.max_model_len)}

    async def generate(self, prompt_ids: list[int], fields: dict[str, Any]) -> dict[str, Any]:
        """Sample one completion. `invalid` in the answer says that vLLM refuses the request itself."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if self._loading:
            raise RuntimeError("a request arrived while weights were being loaded")
        grammar = fields["structured_outputs"]
        version = self._version
        self._count += 1
        self._running += 1
        final = None
        try:
            params = SamplingParams(
                **{**fields, "structured_outputs": StructuredOutputsParams(**grammar) if grammar else None},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = TokensPrompt(prompt_token_ids=prompt_ids)
            async for output in self._engine.generate(prompt, params, f"request-{self._count}"):
                final = output
        except ValueError as fault:
            return {"invalid": str(fault)}
        except Exception as fault:  # noqa: BLE001 - crosses processes as text, the driver has no vLLM
            raise RuntimeError(describe(fault, _own_stderr())) from None
        finally:
            self._running -= 1
        if final is None or not final.finished:
            raise RuntimeError("vLLM ended a request without an output")
        sampled = final.outputs[0]
        return {
            "ids": list(sampled.token_ids),
            "logprobs": list(sampled.logprobs.logprobs) if sampled.logprobs else [],
            "finish_reason": sampled.finish_reason,
            "policy_version": version,
        }

    async def load(self, folder: str, version: int, seed: int) -> dict[str, Any]:
        """Replace the weights by those in `folder`, forget cached prefixes, and compare what is loaded with the files.

        Returns the version now served and the comparison of `WeightCheck.check_weights`. Raises `RuntimeError` when
        requests keep running: their tokens would come from two policies.
        """
        if self._loading:
            raise RuntimeError("weights are being loaded already")
        self._loading = True
        try:
            await self._settle()
            await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            await self._engine.collective_rpc("repack_head")
            await self._forget_prefixes()
            report = await self.compare(folder, seed)
        except Exception as fault:  # noqa: BLE001 - crosses processes as text, the driver has no vLLM
            raise RuntimeError(describe(fault, _own_stderr())) from None
        finally:
            self._loading = False
        self._version = version
        return {"version": self._version, **report}

    async def compare(self, folder: str, seed: int) -> dict[str, Any]:
        """What `WeightCheck.check_weights` says of the served weights and `folder`."""
        (report,) = await self._engine.collective_rpc("check_weights", args=(folder, seed))
        return report

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown(timeout=1)  # there is nothing to save; what lingers is killed
            self._engine = None

    async def _settle(self) -> None:
        for _ in range(50):
            if not self._running:
                return
            await asyncio.sleep(0.1)  # a request that the driver has just cancelled is still being ended here
        raise RuntimeError(f"{self._running} requests are running; weights cannot be replaced under them")

    async def _forget_prefixes(self) -> None:
        for _ in range(50):
            if await self._engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)  # blocks of a request that has just ended are not free yet
        raise RuntimeError("the prefix cache did not reset: blocks are still in use")


class WeightCheck:
    """Mixed into vLLM's worker (`worker_extension_cls`): completes a reload, and compares the served weights with a
    folder, bit for bit.

    On CPU vLLM packs matrices when it loads them and drops the originals, so parameters cannot be compared. A matrix
    is read through its own kernel instead: a one-hot input yields a column exactly, since all other products are 0.
    """

    def repack_head(self) -> None:
        """Pack the head again. On CPU `reload_weights` leaves a head that is tied to the embeddings packed from the old
        ones, because the files hold no weight of its own: logits would mix two policies."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            for module in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def check_weights(self, folder: str, seed: int) -> dict[str, Any]:
        """Compare every vector, the embeddings, the head and up to 32 linear layers (4 columns each) with the files.

        Returns `compared` (number of tensors), `different` and `missing` (names). Needs one worker, hence no tensor
        parallelism; needs modules named as in the files, but for vLLM's fused ones.
        """
        import torch
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        rng = random.Random(seed)
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        dtype = self.model_config.dtype  # type: ignore[attr-defined]
        fusions = getattr(model, "packed_modules_mapping", {})  # vLLM gives it only to models that fuse
        files = _WeightFiles(Path(folder), fusions)
        linears = [(n, m) for n, m in model.named_modules() if isinstance(m, LinearBase)]
        embeddings = [(n, m) for n, m in model.named_modules() if isinstance(m, VocabParallelEmbedding)]
        vectors = [(n, p) for n, p in model.named_parameters() if p.dim() == 1 and p.numel()]
        fused = tuple(f"{n}.bias" for n, _ in linears)
        missing = [n for n, _ in linears if not files.sources(f"{n}.weight")]
        missing += [n for n, _ in vectors if not files.sources(n)]
        different = []
        compared = 0

        def same(name: str, got: Any, wanted: Any) -> None:
            nonlocal compared
            compared += 1
            if not torch.equal(got.cpu().float(), wanted.to(dtype).float()):
                different.append(name)

        with torch.inference_mode():
            for name, module in rng.sample(linears, min(_MAX_CHECKED, len(linears))):
                if name not in missing:
                    columns = rng.sample(range(module.input_size), min(_COLUMNS, module.input_size))
                    got = _columns(module, columns, module.input_size, dtype)
                    same(f"{name}.weight", got, files.read(f"{name}.weight")[:, columns])
            for name, module in embeddings:
                # a tied head is in the files under the embedding's name only
                head = isinstance(module, ParallelLMHead)
                source = next((n for n in (name, *(e for e, _ in embeddings)) if files.sources(f"{n}.weight")), None)
                if source is None:
                    missing.append(name)
                    continue
                weight = files.read(f"{source}.weight")
                rows = module.weight[: weight.shape[0]]
                same(f"{name}.weight", rows, weight)
                if head:
                    columns = rng.sample(range(weight.shape[1]), _COLUMNS)
                    got = _columns(module, columns, weight.shape[1], dtype)[: weight.shape[0]]
                    same(f"{name} (kernel)", got, weight[:, columns])
            for name, vector in vectors:
                if name not in missing:
                    wanted = files.read(name)
                    same(name, vector.to(dtype) if name.endswith(fused) else vector, wanted)
        return {"compared": compared, "different": different, "missing": missing}


class _WeightFiles:
    """The tensors of a folder of safetensors files, by vLLM's parameter names."""

    def __init__(self, folder: Path, packed: Mapping[str, list[str]]) -> None:
        from safetensors import safe_open

        self._packed = packed
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            handle = safe_open(path, framework="pt")
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = handle

    def sources(self, name: str) -> list[str]:
        """The names in the files that make up a parameter, in order. Empty when one of them is not there."""
        stem, _, leaf = name.rpartition(".")
        parent, _, module = stem.rpartition(".")
        names = [f"{parent}.{part}.{leaf}" for part in self._packed.get(module, ())] or [name]
        return names if all(n in self._files for n in names) else []

    def read(self, name: str) -> Any:
        import torch

        return torch.cat([self._files[n].get_tensor(n) for n in self.sources(name)])


def _columns(module: Any, columns: list[int], width: int, dtype: Any) -> Any:
    """Columns of a linear module's matrix, shape (out, len(columns)), read by one-hot inputs without the bias."""
    import torch

    device = next(module.parameters()).device
    one_hot = torch.zeros(len(columns), width, dtype=dtype, device=device)
    one_hot[range(len(columns)), columns] = 1
    return module.quant_method.apply(module, one_hot, None).T


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
