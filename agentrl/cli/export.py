"""`agentrl export`: a checkpoint's policy as a plain Hugging Face folder, or its links."""

from __future__ import annotations

from pathlib import Path

import yaml

from agentrl.cli import console
from agentrl.config.paths import path_fault
from agentrl.errors import ConfigError, MissingError, RunFailedError
from agentrl.models.export import Dtype, export_folder
from agentrl.run import read_manifest, whole_checkpoints


def export(
    run: str,
    step: int | None,
    policy: str | None,
    dest: Path,
    runs: str = "runs",
    dtype: Dtype | None = None,
    official: bool = False,
    merge: bool = False,
) -> None:
    """Write the policy of a run's newest checkpoint, or of `step`, to `dest`, and print the folder.

    `run` is a folder or a name in `runs`. The weights get the run's compute dtype unless `dtype` names another. An
    adapter stays one unless it is to be merged into its model. Raises `ConfigError` and `MissingError` for what is not
    there.
    """
    folder = _run_folder(run, runs)
    checkpoint = _checkpoint(folder, step)
    if fault := path_fault(str(dest)):
        cause, _, fix = fault.rpartition("; ")
        raise ConfigError(f"DEST: {cause}", fix)
    if (checkpoint / "links").is_dir():
        if merge:
            raise ConfigError(f"--merge: {folder.name} trained links, and no adapter", "leave it out")
        _export_links(folder, checkpoint, policy, dest, dtype, official)
        return
    if official:
        raise ConfigError(f"--official: {folder.name} trained no links", "leave it out")
    try:
        name, target = _write(folder, checkpoint, policy, dest, dtype, merge)
    except Exception:  # safetensors has fault types of its own for a file that is gone
        if read_manifest(checkpoint) is not None:
            raise
        # A run that trains meanwhile keeps its newest checkpoints only; the one that replaced this is there.
        checkpoint = _checkpoint(folder, step)
        name, target = _write_once_more(folder, checkpoint, policy, dest, dtype, merge)
    console.out(f"{target}: policy {name} of {folder.name} after step {int(checkpoint.name.removeprefix('step_'))}")


def _export_links(
    run: Path, checkpoint: Path, policy: str | None, dest: Path, dtype: Dtype | None, official: bool
) -> None:
    from agentrl.recipes.recursivemas.export import export_links

    if policy is not None:
        raise ConfigError(f"--policy {policy}: {run.name} trained links, its models are frozen", "leave --policy out")
    target = export_links(run, checkpoint, dest.expanduser(), dtype or "float32", official=official)
    console.out(f"{target}: links of {run.name} after step {int(checkpoint.name.removeprefix('step_'))}")


def _write(
    run: Path, checkpoint: Path, policy: str | None, dest: Path, dtype: Dtype | None, merge: bool
) -> tuple[str, Path]:
    name = _policy(checkpoint, policy)
    source = checkpoint / "policies" / name
    return name, export_folder(source, dest.expanduser(), dtype or _compute_dtype(run, name), merge=merge)


def _write_once_more(
    run: Path, checkpoint: Path, policy: str | None, dest: Path, dtype: Dtype | None, merge: bool
) -> tuple[str, Path]:
    try:
        return _write(run, checkpoint, policy, dest, dtype, merge)
    except Exception as error:  # whatever a reader says of a file that is gone; raised again if it is not
        if read_manifest(checkpoint) is not None:
            raise
        raise RunFailedError(
            f"{checkpoint} was removed while it was copied, and so was the one before it",
            "export again; a run that keeps more (run.keep_last) removes its checkpoints later",
        ) from error


def _run_folder(run: str, runs: str) -> Path:
    for place in () if path_fault(run) else (Path(run).expanduser(), Path(runs) / run):
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
