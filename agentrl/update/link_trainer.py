"""The optimiser step on links: fp32 weights, AdamW, one clip over all links, a schedule, and a state to resume from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from agentrl.config.schema import OptimConfig
from agentrl.errors import DataError, DivergedError
from agentrl.update.parts import global_norm
from agentrl.update.policy import MAX_BROKEN_STEPS, StepStats, learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class LinkTrainer:
    """Trains the links by name ("inner-planner", "outer-planner-critic", ...); nothing else takes gradients.

    Raises `ValueError` for links that are not fp32: an early round's gradient may be decades below the last round's
    and vanish in bf16 sums.
    """

    def __init__(self, links: Mapping[str, nn.Module], optim: OptimConfig, total_steps: int) -> None:
        self.optim, self.total_steps = optim, total_steps
        self.parameters = {
            f"{link}.{name}": parameter
            for link, module in sorted(links.items())
            for name, parameter in module.named_parameters()
        }
        odd = [name for name, p in self.parameters.items() if p.dtype != torch.float32]
        if odd:
            raise ValueError(f"{odd[0]} is {self.parameters[odd[0]].dtype}; links are trained in float32")
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        decayed = [p for p in self.parameters.values() if p.dim() >= 2]
        plain = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        self.steps = 0
        self.broken_steps = 0
        self.moved: frozenset[str] = frozenset()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> StepStats:
        """Clip by the global norm and take one step; gradients are dropped. One that is not finite skips the step.
        `moved` then names the links that it changed.

        Raises `DivergedError` after three such steps in a row.
        """
        lr = learning_rate(self.optim, self.steps, self.total_steps)
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = global_norm(grads)
        if not math.isfinite(norm):
            broken = next((n for n, g in grads.items() if not bool(torch.isfinite(g).all())), "the global norm")
            self.broken_steps += 1
            self.moved = frozenset()
            self.zero_grad()
            if self.broken_steps >= MAX_BROKEN_STEPS:
                raise DivergedError(
                    f"the gradient of link {broken} was not finite in {self.broken_steps} steps in a row",
                    "lower optim.lr or optim.max_grad_norm",
                )
            return StepStats(norm, lr, applied=False, broken=broken)
        self.broken_steps = 0
        limit = self.optim.max_grad_norm
        if limit is not None and norm > limit:
            for grad in grads.values():
                grad.mul_(limit / (norm + 1e-12))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.moved = frozenset(name.partition(".")[0] for name in grads)
        self.zero_grad()
        self.steps += 1
        return StepStats(norm, lr, applied=True)

    def save(self, folder: Path) -> None:
        """Weights in fp32, moments and counters, into the existing folder; `load` goes on from them bit for bit."""
        weights = {name: p.detach().cpu().contiguous() for name, p in self.parameters.items()}
        save_file(weights, folder / "links_state.safetensors")
        moments = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            moments.update({f"{kind}.{name}": state[kind].cpu().contiguous() for kind in _MOMENTS if kind in state})
        save_file(moments, folder / "links_moments.safetensors")
        counters = {"steps": self.steps, "broken_steps": self.broken_steps}
        (folder / "links_state.json").write_text(json.dumps(counters), "utf-8")

    def load(self, folder: Path) -> None:
        """Raises `DataError` for a state of other links."""
        try:
            weights = load_file(folder / "links_state.safetensors")
            moments = load_file(folder / "links_moments.safetensors")
            counters = json.loads((folder / "links_state.json").read_text("utf-8"))
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(f"{folder} holds no whole training state ({error})", "resume from another step") from error
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        found = {name: tuple(w.shape) for name, w in weights.items()}
        if shapes != found:
            odd = next(n for n in sorted(shapes.keys() | found.keys()) if shapes.get(n) != found.get(n))
            raise DataError(
                f"{folder}: link parameter {odd} is {found.get(odd)}, this system has {shapes.get(odd)}",
                "resume with the models and links that the run began with",
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
                state = {kind: moments[f"{kind}.{name}"] for kind in _MOMENTS if f"{kind}.{name}" in moments}
                if state:
                    # Only the step counter stays where it is; moments lie beside their parameter.
                    moved = {k: v if k == "step" else v.to(parameter.device) for k, v in state.items()}
                    self.optimizer.state[parameter] = moved
        self.steps, self.broken_steps = counters["steps"], counters["broken_steps"]
