"""Recorded rollouts for `train --from-rollouts`: one update per recorded step, in place of rolling out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.schema import BaseRecipe
from agentrl.errors import DataError
from agentrl.recipes.collect import Collected
from agentrl.records import trajectory_from_record
from agentrl.types import ScoredTrajectory

Decode = Callable[[Sequence[int]], str]
_STEP = re.compile(r"step_(\d{6,})\.jsonl")
_AGAIN = "record the rollouts again"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The step files of a run folder, or of a folder of them, in the order of their steps (from 1 in training)."""

    folder: Path
    files: tuple[Path, ...]

    @classmethod
    def open(cls, folder: Path) -> Recorded:
        """Raises `DataError` when there is no step file."""
        place = folder / "trajectories" if (folder / "trajectories").is_dir() else folder
        found = {int(m[1]): path for path in place.iterdir() if (m := _STEP.fullmatch(path.name)) and int(m[1]) > 0}
        if not found:
            raise DataError(
                f"--from-rollouts: {place} holds no step_NNNNNN.jsonl", "name the folder of a rollout or training run"
            )
        return cls(place.resolve(), tuple(found[number] for number in sorted(found)))

    def __len__(self) -> int:
        return len(self.files)

    def step(
        self, step: int, recipe: BaseRecipe, versions: Mapping[str, int], decode: Mapping[str, Decode]
    ) -> Collected:
        """The trajectories of training step `step`, with no time spent on them.

        `versions` and `decode` (token ids to text) are by policy. Raises `DataError` for a broken file, for agents or
        tokens that are not this recipe's, and where a completion was sampled by another version of its policy than the
        one that is about to be trained: an update on stale rollouts would need a correction that GRPO does not make.
        """
        path = self.files[step - 1]
        scored = tuple(_read(path))
        for one in scored:
            _check(path, one, recipe, versions, decode)
        return Collected(scored, 0.0, 0.0, reused=len(scored))


def _read(path: Path) -> Sequence[ScoredTrajectory]:
    found: dict[str, ScoredTrajectory] = {}
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: broken JSON: {error}", _AGAIN) from error
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: not an object, so no trajectory", _AGAIN)
        try:
            one = trajectory_from_record(record)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error.cause}", error.fix) from error
        except (AttributeError, ValueError) as error:
            raise DataError(f"{path}:{number}: no trajectory: {error}", _AGAIN) from error
        if one.trajectory.id in found:
            raise DataError(f"{path}:{number}: the trajectory {one.trajectory.id!r} stands there twice", _AGAIN)
        found[one.trajectory.id] = one
    if not found:
        raise DataError(f"{path}: no trajectories", _AGAIN)
    return tuple(found.values())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})", _AGAIN) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", _AGAIN) from error


def _check(
    path: Path,
    scored: ScoredTrajectory,
    recipe: BaseRecipe,
    versions: Mapping[str, int],
    decode: Mapping[str, Decode],
) -> None:
    name = scored.trajectory.id
    for turn in scored.trajectory.turns:
        agent, policy = turn.action.agent, turn.action.request.policy
        if agent not in recipe.agents or recipe.agents[agent].policy != policy:
            raise DataError(
                f"{path}: {name} has the agent {agent!r} on the policy {policy!r}, the recipe has not",
                "train with the recipe that the rollouts were recorded with",
            )
        if decode[policy](turn.action.completion.ids) != turn.action.text:
            raise DataError(
                f"{path}: the tokens of {name} are not those of {recipe.policy_models[policy].name}",
                "train the model that the rollouts were recorded with",
            )
        sampled, current = turn.action.completion.policy_version, versions[policy]
        if sampled != current:
            raise DataError(
                f"{path}: {name} was sampled by version {sampled} of policy {policy!r}, which is at version {current}",
                "train on the recorded steps of one training run, or on one `rollout` step, from the same weights",
            )
