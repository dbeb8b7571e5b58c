"""Public benchmarks by name: where each is published, which columns its rows have, and how they become tasks.

Nothing is downloaded. A benchmark is read from a file that the user saved, either under its name in the data folder
(`data.path: math500`), or anywhere (`data: {path: FILE, format: math500}`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agentrl.data.benchmark_rows import (
    Item,
    gpqa_row,
    gsm8k_row,
    livecodebench_row,
    math_row,
    mbpp_plus_row,
    medqa_row,
    qa_row,
)
from agentrl.data.read import SUFFIXES, read_rows
from agentrl.errors import ConfigError, DataError
from agentrl.files import home

AnswerForm = Literal["boxed", "choice", "code", "short"]
Placed = tuple[str, Item]  # where the row stands, and what it says


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`source`: the public data set and its split. `columns`: what a row must hold. `answer`: the form of an answer,
    by which it is graded. `decodes`: answers per question in the paper's protocol (pass@10 on AIME)."""

    description: str
    source: str
    columns: str
    answer: AnswerForm
    row: Callable[[Mapping[str, Any], str, int], Item]
    decodes: int = 1


_MATH, _AIME = "problem (or question, prompt), answer", "problem (or question, prompt), answer, id (optional)"

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "math500": Benchmark(
            "500 competition problems", "HuggingFaceH4/MATH-500, split test", _MATH, "boxed", math_row
        ),
        "gsm8k": Benchmark(
            "1,319 word problems",
            "openai/gsm8k, config main, split test",
            "question, answer (ending in #### NUMBER)",
            "boxed",
            gsm8k_row,
        ),
        "aime2025": Benchmark(
            "30 competition problems", "MathArena/aime_2025, split train", _AIME, "boxed", math_row, 10
        ),
        "aime2026": Benchmark(
            "30 competition problems", "MathArena/aime_2026, split train", _AIME, "boxed", math_row, 10
        ),
        "gpqa_diamond": Benchmark(
            "198 graduate-level questions with four options",
            "Idavidrein/gpqa, gpqa_diamond.csv (its terms must be accepted)",
            "Question, Correct Answer, Incorrect Answer 1 to 3, Record ID (optional)",
            "choice",
            gpqa_row,
        ),
        "medqa": Benchmark(
            "medical licence questions with four options",
            "GBaker/MedQA-USMLE-4-options, split test",
            "question, options (object or list), answer_idx or answer",
            "choice",
            medqa_row,
        ),
        "mbpp_plus": Benchmark(
            "378 functions with extended tests",
            "evalplus/mbppplus, split test",
            "prompt, test_list, test, test_imports, task_id",
            "code",
            mbpp_plus_row,
        ),
        "livecodebench": Benchmark(
            "programming contest tasks",
            "livecodebench/code_generation_lite, release v6",
            "question_content, starter_code, public_test_cases, private_test_cases, metadata, question_id",
            "code",
            livecodebench_row,
        ),
        "hotpotqa": Benchmark(
            "7,405 two-hop questions, asked without their passages",
            "hotpotqa/hotpot_qa, config distractor, split validation",
            "question, answer, id (optional)",
            "short",
            qa_row,
        ),
        "bamboogle": Benchmark(
            "125 two-hop questions", "chiayewken/bamboogle, split test", "Question, Answer", "short", qa_row
        ),
    }
)


def benchmark_named(name: str) -> Benchmark:
    """Raises `ConfigError` for an unknown name."""
    if name not in BENCHMARKS:
        raise ConfigError(f"data.format: {name!r} is no benchmark", f"use one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def find(name: str) -> Path | None:
    """The file of a benchmark in the data folder, None where there is none."""
    return next((path for path in _places(name) if path.is_file()), None)


def how_to_get(name: str) -> str:
    """Where a benchmark is published, which columns it has, and where its file is looked for."""
    entry = BENCHMARKS[name]
    return (
        f"save {entry.source}, as {_places(name)[0]} (or .json, .csv) with the columns {entry.columns}; "
        f"or name a file anywhere: data: {{path: FILE, format: {name}}}"
    )


def benchmark_items(name: str, path: Path | None = None, limit: int | None = None, seed: int = 0) -> Iterator[Placed]:
    """Every row of a benchmark's file as what to ask and what counts, in order; without `path` from the data folder.

    `seed` shuffles the options of GPQA. Raises `DataError` where the file is missing (and tells how to get it), empty
    or malformed.
    """
    file = path or find(name)
    if file is None:
        raise DataError(f"the benchmark {name!r} is not on this machine: no {_places(name)[0]}", how_to_get(name))
    for place, row in islice(read_rows(file), limit):
        yield place, BENCHMARKS[name].row(row, place, seed)


def _places(name: str) -> tuple[Path, ...]:
    return tuple(home() / "data" / f"{name}{suffix}" for suffix in SUFFIXES)
