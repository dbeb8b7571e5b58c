"""Rows of .jsonl, .json and .csv files, each with the place that an error message names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import DataError

SUFFIXES = (".jsonl", ".json", ".csv")

Row = tuple[str, dict[str, Any]]  # where it stands, and its columns


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of a file. Raises `DataError` naming the file and the line or item that is malformed."""
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: not a {', '.join(SUFFIXES)} file", "convert it, or name an embedded set")
    if not path.is_file():
        raise DataError(f"{path}: no such file", "check data.path, or name an embedded set (`agentrl data list`)")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}", "convert it to UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "check the file's permissions") from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty", "check data.path")
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}[path.suffix.lower()]
    return reader(path, text)


def _jsonl(path: Path, text: str) -> Iterator[Row]:
    # Split at newlines only: JSON text may hold other characters that `splitlines` takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            fix = "write one whole JSON object per line"
            raise DataError(f"{path}:{number}: broken JSON: {error}", fix) from error
        yield f"{path}:{number}", _object(value, f"{path}:{number}")


def _json(path: Path, text: str) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        fix = "write a JSON array of objects; name a file of JSON lines .jsonl"
        raise DataError(f"{path}:{error.lineno}: broken JSON: {error.msg}", fix) from error
    if not isinstance(values, list):
        raise DataError(f"{path}: holds {_kind(values)}, not an array", "write a JSON array of objects")
    if not values:
        raise DataError(f"{path}: the array is empty", "check data.path")
    for number, value in enumerate(values, start=1):
        yield f"{path}: item {number}", _object(value, f"{path}: item {number}")


def _csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or ()
        if len(set(names)) != len(names):
            raise DataError(f"{path}:1: a column name twice in the header ({', '.join(names)})", "name columns apart")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(
                    f"{place}: another number of cells than the header ({', '.join(names)})", "quote cells with commas"
                )
            yield place, dict(row)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num + 1}: broken CSV: {error}", "quote cells as RFC 4180 says") from error


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: {_kind(value)}, not an object", "write one JSON object per task")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
