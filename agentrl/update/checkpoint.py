"""Policies on disk: safetensors and JSON only, so loading runs no code.

A policy's folder is a plain Hugging Face folder (fp32 master weights, config, tokenizer) plus the optimiser's moments
and counters, from which training goes on bit for bit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agentrl.errors import DataError
from agentrl.update.policy import Policy

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_policy(policy: Policy, folder: Path, *, optimizer: bool = True) -> None:
    """Write a policy. The folder must be new; the caller makes it whole or not at all (`Run.checkpoint`)."""
    folder.mkdir(parents=True)
    weights = policy.masters or dict(policy.compute_weights())
    save_file({n: w.contiguous().cpu() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    for name in MODEL_FILES:
        source = policy.folder / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
    if policy.optimizer is None or not optimizer:
        return
    moments = {}
    for name, master in policy.masters.items():
        state = policy.optimizer.state.get(master, {})
        moments.update({f"{kind}.{name}": state[kind].contiguous().cpu() for kind in MOMENTS if kind in state})
    save_file(moments, folder / "optimizer.safetensors")
    counters = {
        "version": policy.version,
        "optimizer_steps": policy.optimizer_steps,
        "broken_steps": policy.broken_steps,
    }
    (folder / "policy.json").write_text(json.dumps(counters), "utf-8")


def load_policy(policy: Policy, folder: Path) -> None:
    """Put a saved policy's weights, moments and counters into `policy`. Raises `DataError` for files that do not fit."""
    weights = _read(folder / "model.safetensors")
    if set(weights) != set(policy.masters):
        odd = sorted(set(weights) ^ set(policy.masters))[0]
        raise DataError(
            f"{folder}: parameter {odd!r} is on one side only", "resume with the model that the run began with"
        )
    counters = json.loads((folder / "policy.json").read_text("utf-8"))
    moments = _read(folder / "optimizer.safetensors")
    assert policy.optimizer is not None, f"policy {policy.name!r} is frozen"
    with torch.no_grad():
        for name, master in policy.masters.items():
            if weights[name].shape != master.shape:
                raise DataError(
                    f"{folder}: {name!r} is {tuple(weights[name].shape)}, the model has {tuple(master.shape)}",
                    "resume with the model that the run began with",
                )
            master.copy_(weights[name])
            if f"exp_avg.{name}" in moments:
                policy.optimizer.state[master] = {
                    "step": torch.tensor(float(counters["optimizer_steps"])),
                    **{kind: moments[f"{kind}.{name}"].to(master.device) for kind in MOMENTS},
                }
    policy.version = counters["version"]
    policy.optimizer_steps = counters["optimizer_steps"]
    policy.broken_steps = counters["broken_steps"]
    policy.publish()


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", "resume from an earlier checkpoint") from error
