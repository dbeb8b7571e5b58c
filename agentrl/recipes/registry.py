"""Methods by name: where their schema and verbs live. Nothing is imported before it is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from agentrl.config.load import Loaded, load
from agentrl.config.schema import BaseRecipe
from agentrl.errors import ConfigError
from agentrl.types import MaskReason


@dataclass(frozen=True, slots=True)
class Method:
    """A method's name, its schema and its verbs, as `module:name` texts."""

    name: str
    schema: str
    verbs: Mapping[str, str]


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "mars": Method(
            "mars",
            "agentrl.recipes.mars.config:MarsRecipe",
            MappingProxyType(
                {
                    "train": "agentrl.recipes.mars.train:train",
                    "eval": "agentrl.recipes.mars.evaluate:evaluate",
                    "infer": "agentrl.recipes.mars.infer:infer",
                    "rollout": "agentrl.recipes.mars.rollout:rollout",
                    "preview": "agentrl.recipes.mars.preview:preview",
                }
            ),
        ),
        "mappa": Method(
            "mappa",
            "agentrl.recipes.mappa.config:MappaRecipe",
            MappingProxyType(
                {
                    "train": "agentrl.recipes.mappa.train:train",
                    "eval": "agentrl.recipes.mappa.evaluate:evaluate",
                    "infer": "agentrl.recipes.mappa.infer:infer",
                    "rollout": "agentrl.recipes.mappa.rollout:rollout",
                    "coach-eval": "agentrl.recipes.mappa.coach_eval:coach_eval",
                    "preview": "agentrl.recipes.mappa.preview:preview",
                }
            ),
        ),
        "recursivemas": Method(
            "recursivemas",
            "agentrl.recipes.recursivemas.recipe:RecursiveRecipe",
            MappingProxyType(
                {
                    "train": "agentrl.recipes.recursivemas.train:train",
                    "eval": "agentrl.recipes.recursivemas.evaluate:evaluate",
                    "infer": "agentrl.recipes.recursivemas.infer:infer",
                    "sweep": "agentrl.recipes.recursivemas.sweep:sweep",
                    "preview": "agentrl.recipes.recursivemas.preview:preview",
                }
            ),
        ),
    }
)


class Progress(Protocol):
    """What a verb may tell while it works; the CLI shows it. `log` is the `Tracker` protocol."""

    def begin(self, total: int, first: int = 1) -> None: ...

    def phase(self, name: str, done: int = 0, of: int = 0) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


class Silence:
    """A `Progress` that shows nothing."""

    def begin(self, total: int, first: int = 1) -> None: ...

    def phase(self, name: str, done: int = 0, of: int = 0) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class VerbOptions:
    """What a verb gets beside its recipe. Values that are config keys too (name, run_dir, checkpoint) are already in
    the recipe; here they tell that the command line gave them."""

    origins: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    from_rollouts: Path | None = None
    checkpoint: str | None = None
    question: str | None = None
    input_file: Path | None = None
    split: str | None = None
    repeats: int = 1
    quiet: bool = False
    json_output: bool = False
    debug: bool = False
    run_dir: str | None = None
    name: str | None = None
    progress: Progress = field(default_factory=Silence)


@dataclass(frozen=True, slots=True)
class Preview:
    """One context as an agent would see it, cut where the mask changes: (text, reason; None where it is trained)."""

    title: str
    parts: tuple[tuple[str, MaskReason | None], ...]


Verb = Callable[[Any, VerbOptions], dict[str, Any]]


def method_named(name: str) -> Method:
    """Raises `ConfigError` with the nearest name for an unknown method."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(METHODS)}"
        raise ConfigError(f"unknown method {name!r}", fix)
    return METHODS[name]


def schema_for(name: str) -> type[BaseRecipe]:
    """The schema of a method. Raises `ConfigError` for an unknown one."""
    schema: type[BaseRecipe] = _import(method_named(name).schema)
    return schema


def verb(method: str, name: str) -> Verb:
    """The function behind a verb. Raises `ConfigError` where the method has no such verb."""
    found = method_named(method)
    target = found.verbs.get(name)
    if target is None or importlib.util.find_spec(target.partition(":")[0]) is None:
        raise ConfigError(f"{method} has no {name}", f"`agentrl {method} --help` lists what it has")
    function: Verb = _import(target)
    return function


def load_recipe(path_or_name: str, overrides: Sequence[str] = (), smoke: bool = False) -> Loaded:
    """Load a recipe of any method by path or shipped name. Raises `ConfigError`."""
    return load(path_or_name, schema_for, overrides, smoke)


def _import(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
