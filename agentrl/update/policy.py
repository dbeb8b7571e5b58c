"""A trainable policy: fp32 master weights, the compute copy that forwards, gradients, and the optimiser step.

With bf16 compute the model's parameters are bf16 copies; each backward pass adds their gradients to fp32
accumulators, so what is summed does not depend on how the batch was split, and AdamW works on the fp32 masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.errors import ConfigError, DivergedError
from agentrl.models import load_model
from agentrl.models.lora import load_into, read_config
from agentrl.update.batch import Layout
from agentrl.update.parts import global_norm
from agentrl.update.probe import HEAD_GAP, choose_layout, head_gap
from agentrl.update.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.update.backbone import Backbone

MAX_BROKEN_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimiser step. `broken` names the first parameter whose gradient was not finite: the step was skipped."""

    grad_norm: float
    lr: float
    applied: bool
    broken: str | None = None


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimiser step `step` (from 0): linear warm-up, then the schedule, which would reach `min_lr_ratio`
    at step `total_steps`, one after the last, so that no step is taken with rate 0."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    span = max(1, total_steps - optim.warmup_steps)
    progress = min(1.0, (step - optim.warmup_steps) / span)
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * shape)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass. Only the layers are put in train mode, which is what switches their
    recomputation on: all that is inside stays in eval mode, so no dropout moves the log-probabilities.

    Raises `ConfigError` for a model without such layers, where the setting would do nothing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"optim.gradient_checkpointing has no effect on {type(model).__name__}", "set it to false for this model"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


class Policy:
    """Weights that agents sample from and that updates change. `version` counts applied updates.

    A `follower` is a trainer rank's replica: it sums gradients and takes weights, but holds no masters and never steps.
    With a `backbone` the policy is an adapter on it, drawn from `seed` or taken from the folder `start`, or, where it
    is frozen and has no `start`, the bare model; weights, gradients and moments are then the adapter's alone.
    """

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
        follower: bool = False,
        backbone: Backbone | None = None,
        start: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.folder, self.config, self.optim = name, folder, config, optim
        self.total_steps = total_steps
        self.version = 0
        self.optimizer_steps = 0
        self.broken_steps = 0
        self.backbone, self.start = backbone, start
        self.adapter: str | None = None
        self.masters: dict[str, Tensor] = {}
        self.layout: Layout
        self._compute: dict[str, torch.nn.Parameter] = {}
        if backbone is None:
            self._load(device)
        else:
            self._adapt(backbone, start, seed)
        self.publish()
        self.grads: dict[str, Tensor] = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        if follower:
            self.masters = {}
        for n in self.grads:
            self._compute[n].register_post_accumulate_grad_hook(self._collect(n))
        if optim.gradient_checkpointing and config.mode != "frozen":
            _checkpoint_layers(self.model)
        self.optimizer = _adamw(self.masters, optim) if self.masters else None
        head = self.model.get_output_embeddings().weight
        self.scorer = Scorer.for_folder(
            self.model,
            folder,
            layout=self.layout,
            capacity=optim.max_tokens_per_row,
            chunk=optim.logprob_chunk,
            train_under_grammar=train_under_grammar,
            head_sink=next((grad for n, grad in self.grads.items() if self._compute[n] is head), None),
            adapted=None if backbone is None else backbone.adapted,
            adapter=self.adapter,
        )

    def _load(self, device: torch.device | str) -> None:
        """Weights of the policy's own."""
        folder, config = self.folder, self.config
        exact = load_model(folder, "float32", attn_implementation="sdpa", device=device)
        self.layout, self.parity = choose_layout(exact, share_prefix=self.optim.share_prefix)
        gap = head_gap(exact)
        if not gap <= HEAD_GAP:
            raise ConfigError(
                f"{folder.name}: the chunked head differs from the model's own logits by {gap:.1e}",
                "use a model whose logits are a linear head with optional scale and soft cap",
            )
        trainable = config.mode != "frozen"
        in_fp32 = config.dtype == "float32"
        if trainable:
            self.masters = {n: p.detach().clone() if in_fp32 else p.detach() for n, p in exact.named_parameters()}
        # Loaded anew, never converted: `Module.to(bfloat16)` would round the rotary frequencies too, which engines
        # keep in fp32, and turn positions beyond about a hundred into other ones.
        self.model = exact if in_fp32 else load_model(folder, config.dtype, attn_implementation="sdpa", device=device)
        del exact
        self.model.requires_grad_(trainable)
        self._compute = dict(self.model.named_parameters())

    def _adapt(self, backbone: Backbone, start: Path | None, seed: int) -> None:
        """The policy's adapter on the model that it shares, if it has one."""
        self.layout, self.parity, self.model = backbone.layout, backbone.parity, backbone.model
        trained = self.config.adapter
        lora = trained if trained is not None or start is None else read_config(start)[0]
        if lora is None:
            return
        adapted = backbone.adapted
        self.adapter = self.name if trained else f"{self.name} (frozen)"
        self._compute = dict(adapted.add(self.adapter, lora, seed=seed, trained=trained is not None))
        exact = {n: p.detach().float().clone() for n, p in self._compute.items()}
        if start is not None:
            load_into(exact, start, lora)
        with torch.no_grad():
            for name, parameter in self._compute.items():
                parameter.copy_(exact[name])
        if trained:
            self.masters = exact
            adapted.use(self.adapter)  # a gradient's hook is refused by a parameter that takes none

    @property
    def trainable(self) -> bool:
        return self.optimizer is not None

    def _collect(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.grads[name].add_(parameter.grad.float())  # adding bf16 to fp32 as it is takes four times as long
            parameter.grad = None

        return add

    def zero_grad(self) -> None:
        for grad in self.grads.values():
            grad.zero_()

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
                    f"policy {self.name!r}: the gradient of {broken} was not finite, in the last of "
                    f"{self.broken_steps} broken steps in a row",
                    "lower optim.lr or optim.max_grad_norm, and look at the last trajectories",
                )
            return StepStats(norm, lr, applied=False, broken=broken)
        self.broken_steps = 0
        limit = self.optim.max_grad_norm
        if limit is not None and norm > limit:
            for grad in self.grads.values():
                grad.mul_(limit / norm)
        for name, master in self.masters.items():
            master.grad = self.grads[name]
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

    def trained_weights(self) -> Mapping[str, Tensor]:
        """The compute weights that updates change, by parameter name; the names and order of `grads`."""
        return {n: self._compute[n].detach() for n in self.grads}

    def broken_weight(self) -> str | None:
        """The first parameter that holds a value that is not finite."""
        return next((n for n, p in self._compute.items() if not bool(torch.isfinite(p).all())), None)

    def compute_weights(self) -> Mapping[str, Tensor]:
        """The weights that an engine must serve, by parameter name; tied ones once."""
        return {n: p.detach() for n, p in self._compute.items()}


def _adamw(masters: Mapping[str, Tensor], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW in one pass over the weights; decay on matrices only, as is usual for norms and biases."""
    groups = [
        {"params": [m for m in masters.values() if m.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
