"""What runs in vLLM's worker process: the fp32 head on CPU, and the check of the weights that are served."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MAX_CHECKED = 32  # linear layers per load; drawn anew each time
_COLUMNS = 4


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`): completes a reload, and compares the served weights with a
    folder, bit for bit.

    On CPU vLLM packs matrices when it loads them and drops the originals, so parameters cannot be compared. A matrix
    is read through its own kernel instead: a one-hot input yields a column exactly, since all other products are 0.
    """

    def renew_heads(self) -> None:
        """On CPU: let the heads follow the weights that are loaded now, and compute logits in fp32 at little cost.

        `reload_weights` leaves a head that is tied to the embeddings packed from the old ones, because the files hold
        no weight of its own: logits would mix two policies. And for an fp32 head vLLM casts the whole weight at every
        token, which costs more than the product; here the fp32 copy is kept. On GPU vLLM accumulates in fp32 itself.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        for module in self._modules_of(ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        copies: dict[int, Any] = {}  # by head; the embeddings themselves are the head of some models
        for processor in self._modules_of(LogitsProcessor):
            if processor.head_dtype == self.model_config.dtype:  # type: ignore[attr-defined]
                continue

            def apply(head: Any, hidden_BD: Any, bias_V: Any) -> Any:
                if id(head) not in copies:
                    copies[id(head)] = head.weight.detach().float()
                return _float32_logits(hidden_BD, copies[id(head)], bias_V)

            processor._apply_head = apply

    def _modules_of(self, kind: type) -> list[Any]:
        return [m for m in self.model_runner.get_model().modules() if isinstance(m, kind)]  # type: ignore[attr-defined]

    def check_weights(self, folder: str, seed: int) -> dict[str, Any]:
        """Compare every vector, the embeddings, the head and up to 32 linear layers (4 columns each) with the files.

        Returns `compared` (number of tensors), `different` and `missing` (names), and `logits_dtype`. Needs one worker,
        hence no tensor parallelism; needs modules named as in the files, but for vLLM's fused ones.
        """
        import torch
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
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
        logits_dtype = ""

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
            for name, table in embeddings:
                # a tied head is in the files under the embedding's name only
                head = isinstance(table, ParallelLMHead) or not self._modules_of(ParallelLMHead)
                source = next((n for n in (name, *(e for e, _ in embeddings)) if files.sources(f"{n}.weight")), None)
                if source is None:
                    missing.append(name)
                    continue
                weight = files.read(f"{source}.weight")
                rows = table.weight[: weight.shape[0]]  # type: ignore[index]
                same(f"{name}.weight", rows, weight)
                if head:
                    columns = rng.sample(range(weight.shape[1]), _COLUMNS)
                    one_hot = _one_hot(table, columns, weight.shape[1], dtype)
                    for processor in self._modules_of(LogitsProcessor):
                        got = processor._apply_head(table, one_hot, None).T[: weight.shape[0]]
                        same(f"{name} (logits)", got, weight[:, columns])
                        logits_dtype = str(got.dtype)
            for name, vector in vectors:
                if name not in missing:
                    wanted = files.read(name)
                    same(name, vector.to(dtype) if name.endswith(fused) else vector, wanted)
        return {"compared": compared, "different": different, "missing": missing, "logits_dtype": logits_dtype}

    def check_adapter(self, adapter: int, folder: str) -> dict[str, Any]:
        """Compare the slots that compute an adapter with its file, every matrix, bit for bit.

        Returns `compared` (number of matrices), `different` and `missing`: names in the file that no slot holds, which
        vLLM leaves out without a word.
        """
        import torch

        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        slot = manager.lora_index_to_id.index(adapter)
        config = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
        scaling, rank = config["lora_alpha"] / config["r"], config["r"]
        files = _WeightFiles(Path(folder), {}, prefix="base_model.model.")
        left, different = set(files.names), []
        with torch.inference_mode():
            for name, module in manager.modules.items():
                parts = manager.packed_modules.get(name) or [name]
                for part, a_SQRD, b_SQOR in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
                    for kind, got in (("A", a_SQRD[slot, 0, :rank]), ("B", b_SQOR[slot, 0, :, :rank])):
                        file = f"{part}.lora_{kind}.weight"
                        if file not in left:
                            same = not got.any()  # a layer without an adapter adds nothing
                        else:
                            left.discard(file)
                            wanted = files.read(file).to(got.dtype)
                            same = torch.equal(got.cpu(), wanted if kind == "A" else wanted * scaling)
                        if not same:
                            different.append(file)
        return {"compared": len(files.names) - len(left), "different": different, "missing": sorted(left)}


class _WeightFiles:
    """The tensors of a folder of safetensors files, by vLLM's parameter names."""

    def __init__(self, folder: Path, packed: Mapping[str, list[str]], prefix: str = "") -> None:
        from safetensors import safe_open

        self._packed = packed
        self._prefix = prefix
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            handle = safe_open(path, framework="pt")
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._files[name.removeprefix(prefix)] = handle

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def sources(self, name: str) -> list[str]:
        """The names in the files that make up a parameter, in order. Empty when one of them is not there."""
        stem, _, leaf = name.rpartition(".")
        parent, _, module = stem.rpartition(".")
        names = [f"{parent}.{part}.{leaf}" for part in self._packed.get(module, ())] or [name]
        return names if all(n in self._files for n in names) else []

    def read(self, name: str) -> Any:
        import torch

        return torch.cat([self._files[n].get_tensor(self._prefix + n) for n in self.sources(name)])


def _columns(module: Any, columns: list[int], width: int, dtype: Any) -> Any:
    """Columns of a linear module's matrix, shape (out, len(columns)), read by one-hot inputs without the bias."""
    return module.quant_method.apply(module, _one_hot(module, columns, width, dtype), None).T


def _one_hot(module: Any, columns: list[int], width: int, dtype: Any) -> Any:
    import torch

    device = next(module.parameters()).device
    one_hot = torch.zeros(len(columns), width, dtype=dtype, device=device)
    one_hot[range(len(columns)), columns] = 1
    return one_hot


def _float32_logits(hidden_BD: Any, weight_VD: Any, bias_V: Any) -> Any:
    """(B, V) in fp32, of bf16 hidden states and an fp32 copy of a bf16 weight.

    The bf16 units may compute it: products of bf16 values are exact in fp32 and are summed there. The switch is the
    process's, which only this product ever wants.
    """
    import torch

    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16"
    try:
        return torch.nn.functional.linear(hidden_BD.float(), weight_VD, None if bias_V is None else bias_V.float())
    finally:
        matmul.fp32_precision = "none"
