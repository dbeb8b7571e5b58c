"""Policies on disk: safetensors and JSON only, so loading runs no code.

A policy's folder is a plain Hugging Face folder (fp32 master weights, config, tokenizer) or an adapter's in peft's
form, plus the optimiser's moments and counters, from which training goes on bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agentrl.errors import DataError
from agentrl.models import lora
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
    if policy.config.adapter is None:
        _save_model(policy.folder, weights, folder)
    else:
        _save_adapter(policy, weights, folder)
    if policy.optimizer is None or not optimizer:
        return
    moments = {}
    for name, master in policy.masters.items():
        state = policy.optimizer.state.get(master)
        if state:
            moments.update({f"{kind}.{name}": state[kind].contiguous().cpu() for kind in MOMENTS})
    save_file(moments, folder / "optimizer.safetensors")
    counters = {
        "version": policy.version,
        "optimizer_steps": policy.optimizer_steps,
        "broken_steps": policy.broken_steps,
    }
    (folder / "policy.json").write_text(json.dumps(counters), "utf-8")


def _save_model(source: Path, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    save_file({n: w.contiguous().cpu() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    for name in MODEL_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _save_adapter(policy: Policy, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    config, backbone = policy.config, policy.backbone
    assert config.adapter is not None
    assert backbone is not None
    own = config.checkpoint is None or policy.start is not None  # else it adapts the full weights of a checkpoint
    base = config.name if own else str(policy.folder.resolve())
    lora.write_weights(folder, weights)
    lora.write_config(folder, config.adapter, base, weights, transposed=backbone.adapted.transposed)


def load_policy(policy: Policy, folder: Path) -> None:
    """Put a saved policy's weights, moments and counters into `policy`, after everything was found to fit.

    Raises `DataError`, and leaves the policy as it was, for files that are damaged, absent, pickled or another model's.
    """
    assert policy.optimizer is not None, f"policy {policy.name!r} is frozen"
    counters = _counters(folder / "policy.json")
    file = folder / ("model.safetensors" if policy.config.adapter is None else lora.WEIGHTS)
    weights = {n.removeprefix(lora.PREFIX): w for n, w in _read(file).items()}
    _check(file, weights, {n: m.shape for n, m in policy.masters.items()})
    moments = _read(folder / "optimizer.safetensors")
    shapes = {f"{kind}.{n}": m.shape for kind in MOMENTS for n, m in policy.masters.items()}
    _check(folder / "optimizer.safetensors", moments, shapes if counters["optimizer_steps"] else {})
    policy.optimizer.state.clear()
    with torch.no_grad():
        for name, master in policy.masters.items():
            master.copy_(weights[name])
            if moments:
                policy.optimizer.state[master] = {
                    "step": torch.tensor(float(counters["optimizer_steps"]), device=master.device),
                    **{kind: moments[f"{kind}.{name}"].to(master.device) for kind in MOMENTS},
                }
    policy.version = counters["version"]
    policy.optimizer_steps = counters["optimizer_steps"]
    policy.broken_steps = counters["broken_steps"]
    policy.publish()


def _check(path: Path, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """Raise `DataError` that names the first tensor which is on one side only, of another shape, or not fp32."""
    fix = "resume with the model that the run began with"
    for name in sorted(set(found) ^ set(wanted)):
        where = "the file" if name in found else "the model"
        raise DataError(f"{path}: {name!r} is in {where} only", fix)
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise DataError(f"{path}: {name!r} is {tuple(found[name].shape)}, the model has {tuple(shape)}", fix)
        if found[name].dtype != torch.float32:
            raise DataError(f"{path}: {name!r} is {found[name].dtype}, a checkpoint holds float32", fix)


def _counters(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "resume from an earlier checkpoint") from error
    names = ("version", "optimizer_steps", "broken_steps")
    if not isinstance(found, dict) or not all(isinstance(found.get(n), int) and found[n] >= 0 for n in names):
        raise DataError(f"{path} lacks the counts {', '.join(names)}", "resume from an earlier checkpoint")
    return {name: found[name] for name in names}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", "resume from an earlier checkpoint") from error
