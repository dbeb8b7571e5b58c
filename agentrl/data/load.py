"""From a file or an embedded set to tasks, with faults that name the row, the columns and the fix."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.schema import DatasetConfig
from agentrl.data.benchmarks import BENCHMARKS, benchmark_items, benchmark_named
from agentrl.data.dsbench import dsbench_tasks
from agentrl.data.order import sample
from agentrl.data.read import read_rows
from agentrl.data.registry import EMBEDDED, embedded_tasks
from agentrl.errors import ConfigError, DataError
from agentrl.types import Task

# Our names, and the columns taken for them when `data.columns` is silent: exact names only, nothing is guessed.
DEFAULT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "id": ("id",),
    "question": ("question",),
    "answer": ("answer", "answers"),
    "files": ("files",),
}


def load_tasks(
    config: DatasetConfig, *, need_answer: bool = True, base: Path | None = None, seed: int = 0
) -> list[Task]:
    """The tasks of a config section, in the file's order. `base` is the folder that relative paths start from.

    Answers may be text, numbers or lists of aliases; further columns become `Task.info`. A task without an id gets
    one made from its content. `need_answer=False` lets answers be absent. `seed` makes an embedded set, and shuffles
    the options of a public benchmark that is published unshuffled.

    Raises `ConfigError` for keys without effect and `DataError` for missing, empty or malformed data.
    """
    if config.path is None:
        raise ConfigError("data.path is not set", "name a .jsonl, .json or .csv file, or an embedded set")
    tasks = _load(config, config.path, need_answer, base, seed)
    return tasks if config.sample is None else sample(tasks, config.sample, config.sample_seed)


def _load(config: DatasetConfig, name: str, need_answer: bool, base: Path | None, seed: int) -> list[Task]:
    if config.format is not None or name in BENCHMARKS:
        return _benchmark_tasks(config, name, base, seed)
    if name in EMBEDDED:
        if config.columns:
            raise ConfigError(f"data.columns has no effect with the embedded set {name!r}", "drop data.columns")
        tasks = embedded_tasks(name, config.split, config.limit, seed)
        _refuse_duplicates([(task.id, f"{name}: task {i}") for i, task in enumerate(tasks, start=1)])
        return tasks
    path = Path(name) if base is None else base / name
    if path.is_dir():
        if config.columns:
            raise ConfigError(f"data.columns has no effect with the folder {name!r}", "drop data.columns")
        return dsbench_tasks(path, config.split)[: config.limit]
    if config.split is not None:
        known = ", ".join(sorted(EMBEDDED))
        raise ConfigError(
            f"data.split: {config.split!r} has no effect with a file",
            f"name another file in data.path, or one of the embedded sets: {known}",
        )
    return _file_tasks(path, config, need_answer)


def _file_tasks(path: Path, config: DatasetConfig, need_answer: bool) -> list[Task]:
    columns: dict[str, str] | None = None
    tasks: list[Task] = []
    places: list[tuple[str, str]] = []
    made: dict[str, int] = {}
    for place, row in read_rows(path):
        if columns is None:
            columns = _match_columns(path, row, config.columns, need_answer)
        task = _task(place, row, columns, need_answer)
        if "id" not in columns:
            # Equal rows are the same task twice, which is no fault: the copies are numbered.
            made[task.id] = made.get(task.id, 0) + 1
            if made[task.id] > 1:
                task = Task(f"{task.id}-{made[task.id]}", task.question, task.references, task.files, task.info)
        tasks.append(task)
        places.append((task.id, place))
        if config.limit is not None and len(tasks) == config.limit:
            break
    if not tasks:
        raise DataError(f"{path}: no rows", "check data.path")
    _refuse_duplicates(places)
    return tasks


def _benchmark_tasks(config: DatasetConfig, name: str, base: Path | None, seed: int) -> list[Task]:
    """A public benchmark as published: by its name from the data folder, or from a file whose `format` it is."""
    for key in ("columns", "split"):
        if getattr(config, key):
            raise ConfigError(f"data.{key}: has no effect with a public benchmark", f"drop data.{key}")
    if config.format not in (None, name) and name in (*EMBEDDED, *BENCHMARKS):
        raise ConfigError(f"data.format: has no effect with the set {name!r}", "drop data.format, or name a file")
    path = None if name in BENCHMARKS else Path(name) if base is None else base / name
    benchmark, entry = config.format or name, benchmark_named(config.format or name)
    tasks: list[Task] = []
    places: list[tuple[str, str]] = []
    made: dict[str, int] = {}
    for place, item in benchmark_items(benchmark, path, config.limit, seed):
        task_id = item.id
        if task_id is None:
            base_id = content_id(item.question, item.references)
            made[base_id] = made.get(base_id, 0) + 1
            task_id = base_id if made[base_id] == 1 else f"{base_id}-{made[base_id]}"
        info = {**item.info, "benchmark": benchmark, "form": entry.answer}
        tasks.append(Task(task_id, item.question, item.references, info=info))
        places.append((task_id, place))
    _refuse_duplicates(places)
    return tasks


def _match_columns(path: Path, row: Mapping[str, Any], given: Mapping[str, str], need_answer: bool) -> dict[str, str]:
    """Our name -> the file's column, for the columns that are there."""
    for name in given:
        if name not in DEFAULT_COLUMNS:
            raise ConfigError(f"data.columns.{name}: unknown name", f"use {', '.join(DEFAULT_COLUMNS)}")
    columns: dict[str, str] = {}
    missing: list[str] = []
    for name, guesses in DEFAULT_COLUMNS.items():
        wanted = (given[name],) if name in given else guesses
        found = next((column for column in wanted if column in row), None)
        if found is not None:
            columns[name] = found
        elif name in given or name == "question" or (name == "answer" and need_answer):
            missing.append(f"{name} (column {' or '.join(map(repr, wanted))})")
    if missing:
        needed = ", ".join(f"{m.split()[0]}: <column>" for m in missing)
        raise DataError(
            f"{path}: needed {', '.join(missing)}; found the columns {', '.join(map(repr, row))}; "
            f"a row: {_shorten(json.dumps(row, ensure_ascii=False, default=str), 300)}",
            f"map them: data.columns: {{{needed}}}",
        )
    return columns


def _task(place: str, row: Mapping[str, Any], columns: Mapping[str, str], need_answer: bool) -> Task:
    for name, column in columns.items():
        if column not in row and (name != "answer" or need_answer):
            raise DataError(f"{place}: no column {column!r} ({name})", "give every row the same columns")
    question = row[columns["question"]]
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{place}: {columns['question']!r} is not a question: {question!r}", "drop or mend the row")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: the question holds half a character (a lone surrogate)", "mend the row") from error
    answer = row.get(columns["answer"]) if "answer" in columns else None
    references = _references(place, columns.get("answer", "answer"), answer)
    if need_answer and not references:
        raise DataError(f"{place}: no answer in {columns['answer']!r}", "drop the row or give it an answer")
    files = row.get(columns["files"], ()) if "files" in columns else ()
    used = set(columns.values())
    info = {name: value for name, value in row.items() if name not in used}
    return Task(
        id=_given_id(place, row[columns["id"]]) if "id" in columns else content_id(question, references),
        question=question,
        references=references,
        files=(files,) if isinstance(files, str) else tuple(map(str, files or ())),
        info=info,
    )


def content_id(question: str, references: Sequence[str]) -> str:
    """An id made from what a task asks and expects."""
    text = json.dumps([question, *references])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _given_id(place: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{place}: the id {value!r} is neither text nor a whole number", "mend it, or drop the column")
    return str(value)


def _references(place: str, column: str, value: Any) -> tuple[str, ...]:
    """Every accepted answer as text, without repeats. A whole float is written as an integer: 142.0 is "142"."""
    texts: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool):
            text = "true" if item else "false"
        elif isinstance(item, float) and math.isfinite(item):
            text = str(int(item)) if item.is_integer() else repr(item)
        elif item is None or isinstance(item, str | int):
            text = "" if item is None else str(item).strip()
        else:
            raise DataError(
                f"{place}: {column!r} is neither text, a number nor a list of them: {_shorten(repr(value), 80)}",
                "mend the row, or map another column in data.columns",
            )
        if text and text not in texts:
            texts.append(text)
    return tuple(texts)


def _refuse_duplicates(places: Sequence[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for name, place in places:
        if name in seen:
            raise DataError(
                f"{place}: the id {name!r} is taken by {seen[name]}",
                "make ids unique, or map `id` to another column in data.columns",
            )
        seen[name] = place


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
