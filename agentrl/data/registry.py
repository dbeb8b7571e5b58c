"""Embedded sets: data that is made by code of the package, so that every recipe runs without a download."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class EmbeddedSet:
    """`tasks` names `function(split, n, seed) -> list[Task]`; `corpus` names `function()` -> rows with `title` and
    `text`; `folder` names `function()` -> the folder that a set with files of its own lies in, made where it is absent.
    `sizes` holds each split's number of tasks when `limit` is silent."""

    description: str
    tasks: str
    corpus: str | None
    sizes: Mapping[str, int]
    folder: str | None = None


EMBEDDED: Mapping[str, EmbeddedSet] = MappingProxyType(
    {
        "invented": EmbeddedSet(
            description="questions on invented facts, answered by one page of an embedded corpus",
            tasks="agentrl.data.invented:generate",
            corpus="agentrl.data.invented:corpus",
            sizes={"train": 720, "eval": 240},
        ),
        "invented-pages": EmbeddedSet(
            description="the same questions with four facts above them, one of which answers: reading without a search",
            tasks="agentrl.data.pages:generate",
            corpus=None,
            sizes={"train": 720, "eval": 240},
        ),
        "arithmetic": EmbeddedSet(
            description="sums, differences and products of small numbers, in words: answers that rules can grade",
            tasks="agentrl.data.arithmetic:generate",
            corpus=None,
            sizes={"train": 400, "eval": 100},
        ),
        "channel": EmbeddedSet(
            description="one of 96 code words, told in a note ({task.note}); wordings and animals are held out",
            tasks="agentrl.data.channel:code_words",
            corpus=None,
            sizes={"train": 1920, "eval": 480},
        ),
        "channel-notes": EmbeddedSet(
            description="the notes of channel as questions: what is told is asked back",
            tasks="agentrl.data.channel:notes",
            corpus=None,
            sizes={"train": 1920, "eval": 480},
        ),
        "channel-numbers": EmbeddedSet(
            description="numbers of 1 to 6 digits, told in such a note",
            tasks="agentrl.data.channel:numbers",
            corpus=None,
            sizes={"train": 3000, "eval": 600},
        ),
        "dsbench-sklearn": EmbeddedSet(
            description="modelling tasks on scikit-learn's bundled data sets, laid out as DSBench: CSVs to learn from",
            tasks="agentrl.data.sklearn_suite:generate",
            corpus=None,
            sizes={"train": 16, "eval": 8},
            folder="agentrl.data.sklearn_suite:prepared",
        ),
    }
)


def embedded_tasks(name: str, split: str | None = None, limit: int | None = None, seed: int = 0) -> list[Task]:
    """The tasks of an embedded set; the split is `train` unless named. Raises `ConfigError` for an unknown one."""
    entry = _entry(name)
    chosen = split or "train"
    if chosen not in entry.sizes:
        raise ConfigError(f"data.split: {chosen!r} is no split of {name!r}", f"use {' or '.join(entry.sizes)}")
    tasks: list[Task] = _function(entry.tasks)(chosen, limit or entry.sizes[chosen], seed)
    return tasks


def embedded_corpus(name: str) -> Sequence[Mapping[str, str]] | None:
    """The rows (`title`, `text`) of an embedded corpus, or None when no set of that name has one."""
    if name not in EMBEDDED:
        return None
    corpus = EMBEDDED[name].corpus
    return None if corpus is None else list(_function(corpus)())


def embedded_folder(name: str) -> Path | None:
    """The folder of an embedded set with files of its own, made where it is absent; None for any other set. Raises
    `ConfigError` for an unknown one."""
    folder = _entry(name).folder
    return None if folder is None else Path(_function(folder)())


def _entry(name: str) -> EmbeddedSet:
    if name not in EMBEDDED:
        raise ConfigError(f"no embedded set {name!r}", f"known sets: {', '.join(sorted(EMBEDDED))}")
    return EMBEDDED[name]


def _function(target: str) -> Any:
    module, name = target.split(":")
    return vars(importlib.import_module(module))[name]
