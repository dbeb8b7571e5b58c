"""A trainable policy: fp32 master weights, the compute copy that forwards, gradients, and the optimiser step.

With bf16 compute the model's parameters are bf16 copies; each backward pass adds their gradients to fp32
accumulators, so what is summed does not depend on how the batch was split, and AdamW works on the fp32 masters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.errors import ConfigError, DivergedError
from agentrl.update.batch import Layout
from agentrl.update.probe import choose_layout, head_gap
from agentrl.update.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_BROKEN_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimiser step. `broken` names the first parameter whose gradient was not finite: the step was skipped."""

    grad_norm: float
    lr: float
    applied: bool
    broken: str | None = None


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimiser step `step` (from 0): linear warm-up, then the schedule down to `min_lr_ratio`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    span = max(1, total_steps - optim.warmup_steps)
    progress = min(1.0, (step - optim.warmup_steps) / span)
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)


def load_causal_model(folder: Path, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """A causal model from a folder in Hugging Face layout, without dropout, in eval mode. Safetensors only."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, attn_implementation="sdpa"
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device).eval()


class Policy:
    """Weights that agents sample from and that updates change. `version` counts applied updates."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: ModelConfig,
        optim: OptimConfig,
        *,
        total_steps: int,
        train_under_grammar: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.folder, self.config, self.optim = name, folder, config, optim
        self.total_steps = total_steps
        self.version = 0
        self.optimizer_steps = 0
        self.broken_steps = 0
        compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.model = load_causal_model(folder, torch.float32, device)
        self.layout: Layout
        self.layout, self.parity = choose_layout(self.model, share_prefix=optim.share_prefix)
        gap = head_gap(self.model)
        if gap > 1e-3:
            raise ConfigError(
                f"{folder.name}: the chunked head differs from the model's own logits by {gap:.1e}",
                "use a model whose logits are a linear head with optional scale and soft cap",
            )
        trainable = config.mode != "frozen"
        self.masters: dict[str, Tensor] = {}
        if trainable:
            self.masters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.model.to(compute).requires_grad_(trainable)
        self._compute = dict(self.model.named_parameters())
        self.grads: dict[str, Tensor] = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        for n in self.masters:
            self._compute[n].register_post_accumulate_grad_hook(self._collect(n))
        if optim.gradient_checkpointing and trainable:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.optimizer = _adamw(self.masters, optim) if trainable else None
        self.scorer = Scorer.for_folder(
            self.model,
            folder,
            layout=self.layout,
            capacity=optim.max_tokens_per_row,
            chunk=optim.logprob_chunk,
            train_under_grammar=train_under_grammar,
        )

    @property
    def trainable(self) -> bool:
        return self.optimizer is not None

    def _collect(self, name: str):
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.grads[name].add_(parameter.grad)
            parameter.grad = None

        return add

    def zero_grad(self) -> None:
        for grad in self.grads.values():
            grad.zero_()

    @contextmanager
    def part_gradient(self, keep: bool) -> Iterator[dict[str, Tensor]]:
        """Within the block gradients accumulate as ever; afterwards the dict holds what the block alone added."""
        before = {n: g.clone() for n, g in self.grads.items()} if keep else {}
        part: dict[str, Tensor] = {}
        yield part
        if keep:
            part.update({n: g - before[n] for n, g in self.grads.items()})

    def step(self) -> StepStats:
        """Clip by the global norm and take one AdamW step. A gradient that is not finite skips the step, by name.

        Raises `DivergedError` after three such steps in a row.
        """
        assert self.optimizer is not None, f"policy {self.name!r} is frozen"
        lr = learning_rate(self.optim, self.optimizer_steps, self.total_steps)
        norm = global_norm(self.grads)
        if not math.isfinite(norm):
            broken = next((n for n, g in self.grads.items() if not bool(torch.isfinite(g).all())), "the global norm")
            self.broken_steps += 1
            if self.broken_steps >= MAX_BROKEN_STEPS:
                raise DivergedError(
                    f"policy {self.name!r}: the gradient of {broken} was not finite in {self.broken_steps} steps in a row",
                    "lower optim.lr or optim.max_grad_norm, and look at the last trajectories",
                )
            return StepStats(norm, lr, applied=False, broken=broken)
        self.broken_steps = 0
        limit = self.optim.max_grad_norm
        scale = 1.0 if limit is None or norm <= limit else limit / (norm + 1e-12)
        for name, master in self.masters.items():
            master.grad = self.grads[name].mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        self.optimizer_steps += 1
        self.version += 1
        self.publish()
        return StepStats(norm, lr, applied=True)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the compute weights."""
        for name, master in self.masters.items():
            self._compute[name].copy_(master)

    def compute_weights(self) -> Mapping[str, Tensor]:
        """The weights that an engine must serve, by parameter name; tied ones once."""
        return {n: p.detach() for n, p in self._compute.items()}


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors, in fp32."""
    if not tensors:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors.values()])))


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float | None:
    """The cosine of two gradients; None when either is zero."""
    norms = global_norm(a) * global_norm(b)
    if norms == 0.0:
        return None
    return sum(float((a[n] * b[n]).sum()) for n in a) / norms


def _adamw(masters: Mapping[str, Tensor], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW; decay on matrices only, as is usual for norms and biases."""
    groups = [
        {"params": [m for m in masters.values() if m.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=True)
