"""`agentrl data`: embedded sets and data files, their columns and counts, and a row of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.cli import console
from agentrl.types import Task


def data_list(json_output: bool = False) -> int:
    """Print every embedded set with its splits, and every public benchmark with where it is published and whether its
    file is here. Returns the exit code."""
    from agentrl.data import BENCHMARKS, EMBEDDED
    from agentrl.data.benchmarks import find

    if json_output:
        embedded = [{"name": n, "splits": dict(e.sizes), "description": e.description} for n, e in EMBEDDED.items()]
        public = [
            {"name": n, "description": b.description, "source": b.source, "columns": b.columns, "file": find(n)}
            for n, b in BENCHMARKS.items()
        ]
        console.json([*embedded, *public])
        return 0
    rows = [
        (name, ", ".join(f"{split} {size}" for split, size in entry.sizes.items()), entry.description)
        for name, entry in EMBEDDED.items()
    ]
    console.table(("name", "splits", "description"), rows, title="data sets (a .jsonl, .json or .csv file works too)")
    known = [(n, b.description, b.source, find(n) or f"no: agentrl data show {n}") for n, b in BENCHMARKS.items()]
    console.table(("name", "what", "published as", "here"), known, title="public benchmarks, read as published")
    return 0


def data_prepare(name: str, json_output: bool = False) -> int:
    """Write an embedded set's splits and corpus as JSON lines into the cache folder, and print their paths. A set with
    files of its own is a folder there, which `data.path` may name too.

    Raises `ConfigError` for an unknown name and `RunFailedError` when the folder cannot be written.
    """
    from agentrl.data import EMBEDDED, embedded_corpus, embedded_folder, embedded_tasks
    from agentrl.errors import ConfigError
    from agentrl.files import encode, failed, replace_file
    from agentrl.models.cache import home

    if name not in EMBEDDED:
        raise ConfigError(f"no embedded set {name!r}", f"known sets: {', '.join(EMBEDDED)}; a file needs no preparing")
    own = embedded_folder(name)
    if own is not None:
        console.json({"name": name, "folder": str(own)}) if json_output else console.out(f"{name}: {own}")
        return 0
    folder = home() / "data" / name
    tables: dict[str, list[Any]] = {
        split: [{"id": t.id, "question": t.question, "answer": list(t.references)} for t in embedded_tasks(name, split)]
        for split in EMBEDDED[name].sizes
    }
    corpus = embedded_corpus(name)
    if corpus is not None:
        tables["corpus"] = [dict(row) for row in corpus]
    paths = {}
    for table, rows in tables.items():
        path = folder / f"{table}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, b"".join(encode(row) + b"\n" for row in rows))
        except OSError as error:
            raise failed(path, error) from error
        paths[table] = str(path)
    if json_output:
        console.json({"name": name, "files": paths})
        return 0
    for table, saved in paths.items():
        console.out(f"{name} {table}: {len(tables[table])} rows in {saved}")
    return 0


def data_show(path_or_name: str, json_output: bool = False) -> int:
    """Print the columns, counts and first row of a file or of an embedded set.

    Raises `DataError` when the file is missing, empty or malformed anywhere.
    """
    shown = _shown(path_or_name)
    if json_output:
        console.json(shown)
        return 0
    for table in shown["tables"]:
        console.out(f"{table['name']}: {table['rows']} rows")
        row = table["row"]
        columns = [(name, count, _short(row.get(name))) for name, count in table["columns"].items()]
        console.table(("column", "rows with a value", "in the first row"), columns)
    return 0


def _shown(path_or_name: str) -> dict[str, Any]:
    from agentrl.config.schema import DatasetConfig
    from agentrl.data import BENCHMARKS, EMBEDDED, embedded_tasks, load_tasks
    from agentrl.data.dsbench import dsbench_tasks
    from agentrl.data.read import read_rows

    if path_or_name in BENCHMARKS:
        tasks = load_tasks(DatasetConfig(path=path_or_name))
        return {"name": path_or_name, "tables": [_table(path_or_name, [_row(t) for t in tasks])]}
    if path_or_name not in EMBEDDED and Path(path_or_name).is_dir():
        return {
            "name": path_or_name,
            "tables": [_table(path_or_name, [_row(t) for t in dsbench_tasks(Path(path_or_name))])],
        }
    if path_or_name not in EMBEDDED:
        rows = [row for _, row in read_rows(Path(path_or_name))]
        return {"name": path_or_name, "tables": [_table(path_or_name, rows)]}
    tables = []
    for split in EMBEDDED[path_or_name].sizes:
        tasks = embedded_tasks(path_or_name, split)
        tables.append(_table(f"{path_or_name}, {split}", [_row(task) for task in tasks]))
    return {"name": path_or_name, "tables": tables}


def _row(task: Task) -> dict[str, Any]:
    files = {"files": list(task.files)} if task.files else {}
    return {"id": task.id, "question": task.question, "answer": list(task.references), **files, **task.info}


def _table(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, int] = {}
    for row in rows:
        for column, value in row.items():
            columns[column] = columns.get(column, 0) + (value not in (None, "", []))
    return {"name": name, "rows": len(rows), "columns": columns, "row": rows[0] if rows else {}}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."
