"""A run folder as a value. Everything in the report reads runs through this module and nothing else."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError
from agentrl.files import read_lines
from agentrl.run import whole_checkpoints

_STEP_FILE = re.compile(r"step_(\d{6,})(\.part)?\.jsonl")


@dataclass(frozen=True, slots=True)
class RunView:
    """What a run folder holds, also while the run goes on. `steps` maps a step to its trajectories' file; a step in
    `unfinished` has only those that finished so far."""

    path: Path
    metrics: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    steps: Mapping[int, Path]
    unfinished: frozenset[int]
    checkpoints: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.path.name

    def trajectories(self, step: int) -> list[dict[str, Any]]:
        """The records of a step, in the file's order. Raises `ConfigError` for a step that the run does not have."""
        if step not in self.steps:
            known = f"{min(self.steps)} to {max(self.steps)}" if self.steps else "none yet"
            raise ConfigError(f"--step {step}: run {self.name!r} has no trajectories of it", f"steps: {known}")
        return _lines(self.steps[step])


def open_run(run: str | Path, base: str | Path = "runs") -> RunView:
    """A run by its folder, or by its name in `base`. Raises `ConfigError` naming close ones, `DataError` for a broken
    file."""
    path = next((p for p in (Path(run), Path(base) / run) if (p / "config.yaml").is_file()), None)
    if path is None:
        names = [p.parent.name for p in Path(base).glob("*/config.yaml")]
        close = difflib.get_close_matches(str(run), names, n=3) or sorted(names)[-3:]
        hint = f"runs in {base}: {', '.join(close)}" if close else f"name a folder; there are no runs in {base}"
        raise ConfigError(f"no run at {str(run)!r}", hint)
    steps: dict[int, Path] = {}
    unfinished: set[int] = set()
    folder = path / "trajectories"
    # Sorted, `.jsonl` comes before `.part.jsonl`: a committed step wins over what is left of its part.
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STEP_FILE.fullmatch(file.name)
        if match and int(match[1]) not in steps:
            steps[int(match[1])] = file
            if match[2]:
                unfinished.add(int(match[1]))
    return RunView(
        path=path,
        metrics=tuple(_lines(path / "metrics.jsonl")),
        summary=_summary(path / "summary.json"),
        steps=dict(sorted(steps.items())),
        unfinished=frozenset(unfinished),
        checkpoints=tuple(sorted(whole_checkpoints(path))),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(path)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path}: broken: {error}", "mend or remove the line; runs themselves write whole lines"
        ) from error


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        value: Mapping[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: broken: {error}", "remove it; the run itself is not affected") from error
    return value
