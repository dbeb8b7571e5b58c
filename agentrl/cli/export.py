"""`agentrl export`: a checkpoint's policy as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import yaml

from agentrl.cli import console
from agentrl.errors import ConfigError, MissingError
from agentrl.models.export import Dtype, export_folder
from agentrl.run import whole_checkpoints


def export(
    run: str, step: int | None, policy: str | None, dest: Path, runs: str = "runs", dtype: Dtype | None = None
) -> None:
    """Write the policy of a run's newest checkpoint, or of `step`, to `dest`, and print the folder.

    `run` is a folder or a name in `runs`. The weights get the run's compute dtype unless `dtype` names another. Raises
    `ConfigError` and `MissingError` for what is not there.
    """
    folder = _run_folder(run, runs)
    checkpoint = _checkpoint(folder, step)
    name = _policy(checkpoint, policy)
    target = export_folder(checkpoint / "policies" / name, dest.expanduser(), dtype or _compute_dtype(folder, name))
    console.out(f"{target}: policy {name} of {folder.name} after step {int(checkpoint.name.removeprefix('step_'))}")


def _run_folder(run: str, runs: str) -> Path:
    for place in (Path(run).expanduser(), Path(runs) / run):
        if (place / "checkpoints").is_dir():
            return place
    raise ConfigError(f"RUN: there is no run {run!r}, neither a folder nor a name in {runs}", "name a run's folder")


def _checkpoint(run: Path, step: int | None) -> Path:
    whole = whole_checkpoints(run)
    if not whole:
        raise MissingError(f"{run} has no whole checkpoint", "train first, or set run.save_every lower")
    if step is None:
        return whole[max(whole)]
    if step not in whole:
        kept = ", ".join(str(number) for number in sorted(whole))
        raise ConfigError(f"--step {step}: {run.name} has no checkpoint of that step", f"it has those of {kept}")
    return whole[step]


def _policy(checkpoint: Path, policy: str | None) -> str:
    have = sorted(path.name for path in (checkpoint / "policies").glob("*") if path.is_dir())
    if policy is None and len(have) == 1:
        return have[0]
    names = ", ".join(have) or "none"
    if policy is None:
        raise ConfigError(f"{checkpoint} holds several policies or none", f"name one with --policy: {names}")
    if policy not in have:
        raise ConfigError(f"--policy {policy}: not in {checkpoint} (frozen ones are not saved)", f"it has {names}")
    return policy


def _compute_dtype(run: Path, policy: str) -> Dtype:
    """What the run computed that policy in, as its config says."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    model = (config.get("policies") or {}).get(policy) or config.get("model") or {}
    return "float32" if model.get("dtype") == "float32" else "bfloat16"
