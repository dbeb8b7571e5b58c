"""What a resumed run may change of the config it was started with, so that its steps stay comparable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from agentrl.config.schema import BaseRecipe
from agentrl.errors import ConfigError
from agentrl.recipes.registry import Progress

# How a run is run, not what it trains on and towards. Everything else must stay, keys of later versions included.
_FREE = ("run.", "launch.", "engine.", "optim.", "rollout.max_concurrent")
_BOUND = ("run.seed", "run.eval_temperature")
_SCORERS = ("judge", "coach")
_CALLS = (
    "timeout_s",
    "max_retries",
    "backoff_s",
    "max_concurrent",
    "price",
    "budget",
    "record",
    "base_url",
    "api_key_env",
)
_FREE_CALLS = tuple(f"{scorer}.{key}" for scorer in _SCORERS for key in _CALLS)
_SILENT = ("run.name", "run.dir")


def approve(
    recipe: BaseRecipe, progress: Progress, *, free: tuple[str, ...] = (), bound: tuple[str, ...] = ()
) -> Callable[[str, int], None]:
    """The check of `Run.create` on resume: the config of before (YAML) and the step that the run is at.

    It raises `ConfigError` when the run is beyond `run.steps`, and naming key, old and new value for a change that
    would make the steps before and after it incomparable. Other changes are noted. How a judge or a coach is reached
    and paid for may change, for instance when a budget is used up; what it is asked may not. `free` and `bound` are
    further beginnings of keys that may change and that must stay.
    """

    def check(before: str, step: int) -> None:
        if step > recipe.run.steps:
            raise ConfigError(
                f"run.steps: the run is already at step {step} of {recipe.run.steps}",
                f"give --steps {step} or more, or start a new run with another --name",
            )
        noted = []
        for key, old, new in _changes(_resolved(before, recipe), recipe.model_dump(mode="json"), ""):
            change = f"{key}: {_short(old)} -> {_short(new)}"
            if key.startswith(bound) or not (_free(key) or key.startswith(free)):
                raise ConfigError(
                    f"{key}: the run was started with {_short(old)}, now it is {_short(new)}",
                    "resume with the config it began with, or start a new run with another --name",
                )
            if key not in _SILENT:
                noted.append(change)
        if noted:
            progress.note(f"resumed with another config: {', '.join(noted)}")

    return check


def _free(key: str) -> bool:
    if key in _BOUND:
        return False
    return key.startswith(_FREE) or any(key == free or key.startswith(f"{free}.") for free in _FREE_CALLS)


def _resolved(text: str, recipe: BaseRecipe) -> Any:
    """The config of before with this version's defaults, so that a key that is new since then is no change."""
    values = yaml.safe_load(text)
    try:
        return type(recipe).model_validate_json(json.dumps(values)).model_dump(mode="json")
    except ValidationError:
        return values


def _changes(old: Any, new: Any, at: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            yield from _changes(old.get(key), new.get(key), f"{at}.{key}" if at else str(key))
    elif old != new:
        yield at, old, new


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"
