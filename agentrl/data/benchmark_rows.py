"""Rows of public benchmarks, as their publishers wrote them -> tasks.

Each function takes a row, the place that an error names, and the run's seed, and gives what to ask and what counts.
Raises `DataError` for a row that is not of its layout, naming the place and the column.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import random
import re
import string
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import DataError

_LETTERED = re.compile(r"^\s*\(?[A-Z][.):]\s*")
_SHOWN_TESTS = 3


@dataclass(frozen=True, slots=True)
class Item:
    """A task without a safe id: `id` is the row's own, or None."""

    question: str
    references: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


def math_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """A problem with its final answer: MATH-500, AIME."""
    name = next((n for n in ("unique_id", "id", "problem_idx") if row.get(n) not in (None, "")), None)
    question = _text(row, place, "problem", "question", "prompt")
    info = {key: row[key] for key in ("subject", "level", "year") if key in row}
    return Item(question, (_answer(row, place, "answer"),), info, None if name is None else str(row[name]))


def gsm8k_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """A word problem whose solution ends in `#### ANSWER`."""
    solution = _text(row, place, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise DataError(f"{place}: 'answer' does not end in '#### NUMBER'", "take the file as published")
    return Item(_text(row, place, "question"), (answer.strip().replace(",", ""),))


def gpqa_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """Four options, shuffled by a hash of the seed and the question alone, so that neither order nor file matters."""
    stem = _text(row, place, "Question").strip()
    right = _text(row, place, "Correct Answer").strip()
    options = [right, *(_text(row, place, f"Incorrect Answer {i}").strip() for i in (1, 2, 3))]
    digest = hashlib.sha256(f"{seed}\n{stem}".encode("utf-8", "backslashreplace")).digest()
    order = list(range(4))
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    letters = {string.ascii_uppercase[place]: options[index] for place, index in enumerate(order)}
    name = row.get("Record ID")
    return Item(
        _with_options(stem, letters),
        (string.ascii_uppercase[order.index(0)],),
        {"options": letters},
        None if not name else str(name),
    )


def medqa_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """Options as a mapping or as a list of "A. ..."; the answer as a letter (`answer_idx`) or as an option's words."""
    given = row.get("options")
    if isinstance(given, Mapping):
        letters = {str(k).strip().upper(): str(v).strip() for k, v in given.items()}
    elif isinstance(given, Sequence) and not isinstance(given, str) and given:
        letters = {string.ascii_uppercase[i]: _LETTERED.sub("", str(v)).strip() for i, v in enumerate(given)}
    else:
        raise DataError(f"{place}: 'options' is neither a list nor an object", "take the file as published")
    answer = str(row.get("answer_idx") or row.get("answer") or "").strip()
    words = _LETTERED.sub("", answer)
    right = [name for name, text in letters.items() if answer.upper() == name or text in (answer, words)]
    if len(right) != 1:
        raise DataError(f"{place}: the answer {answer!r} is not one of the options {sorted(letters)}", "mend the row")
    stem = _text(row, place, "question")
    # Some copies repeat the options below the question.
    stem = re.split(rf"\n\s*A[.)]\s*{re.escape(letters['A'])}", stem)[0].strip() if "A" in letters else stem
    return Item(_with_options(stem, letters), (right[0],), {"options": letters})


def mbpp_plus_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """A function to write; the first tests are shown, all of them are run."""
    shown = row.get("test_list")
    if not isinstance(shown, Sequence) or isinstance(shown, str) or not shown:
        raise DataError(f"{place}: no tests in 'test_list'", "take the file as published")
    imports = row.get("test_imports") or []
    tests = "\n".join([*map(str, imports), _text(row, place, "test")]) + "\n"
    question = "\n".join(
        [_text(row, place, "prompt", "text").strip(), "", "It must pass:", *map(str, shown[:_SHOWN_TESTS])]
    )
    return Item(question, (), {"tests": tests}, str(row.get("task_id") or "") or None)


def livecodebench_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """A program that reads and prints, or a method of the given class; public and private cases both count."""
    cases = [*_cases(row, place, "public_test_cases"), *_cases(row, place, "private_test_cases")]
    if not cases:
        raise DataError(f"{place}: neither public nor private test cases", "take the file as published")
    question = _text(row, place, "question_content").strip()
    starter = str(row.get("starter_code") or "").strip("\n")
    name = str(row.get("question_id") or "") or None
    if not any(case.get("testtype") == "functional" for case in cases):
        plain = [{"input": str(case["input"]), "output": str(case["output"])} for case in cases]
        return Item(f"{question}\n\nRead from standard input, write to standard output.", (), {"cases": plain}, name)
    method = _parsed(row.get("metadata") or "{}", place, "metadata").get("func_name")
    if not method:
        raise DataError(f"{place}: 'metadata' names no func_name", "take the file as published")
    return Item(
        f"{question}\n\nComplete this:\n```python\n{starter}\n```",
        (),
        {"tests": _functional_tests(cases, str(method), place)},
        name,
    )


def qa_row(row: Mapping[str, Any], place: str, seed: int) -> Item:
    """A question with a short answer: HotpotQA, Bamboogle."""
    name = row.get("id") or row.get("_id")
    answer = _answer(row, place, "answer", "Answer")
    return Item(_text(row, place, "question", "Question"), (answer,), {}, None if not name else str(name))


def _functional_tests(cases: Sequence[Mapping[str, Any]], method: str, place: str) -> str:
    """Python that calls the solution's method with each case's arguments (one JSON value per line)."""
    calls = []
    for case in cases:
        try:
            arguments = [json.loads(line) for line in str(case["input"]).splitlines() if line.strip()]
            calls.append([arguments, json.loads(str(case["output"]))])
        except (KeyError, ValueError) as error:
            raise DataError(f"{place}: a functional test case is no JSON: {error}", "mend the row") from error
    return (
        f"import json\n_cases = json.loads({json.dumps(json.dumps(calls))})\n"
        f"_target = Solution().{method} if 'Solution' in globals() else {method}\n"
        "for _arguments, _expected in _cases:\n"
        "    _got = _target(*_arguments)\n"
        "    _got = list(_got) if isinstance(_got, tuple) else _got\n"
        "    assert _got == _expected\n"
    )


def _cases(row: Mapping[str, Any], place: str, column: str) -> list[dict[str, Any]]:
    value = row.get(column) or []
    if isinstance(value, str):
        value = _parsed(value if value.lstrip().startswith("[") else _unpacked(value, place, column), place, column)
    if not isinstance(value, list) or not all(isinstance(v, dict) and {"input", "output"} <= set(v) for v in value):
        raise DataError(f"{place}: {column!r} is no list of input and output", "take the file as published")
    return value


def _unpacked(text: str, place: str, column: str) -> str:
    """Private cases are published as base64 of zlib of a pickled text. Nothing but a plain value is unpickled."""
    try:
        value = _PlainUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{place}: {column!r} cannot be unpacked: {error}", "take the file as published") from error
    return str(value)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only a text may stand there")


def _parsed(text: Any, place: str, column: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{place}: {column!r} is no JSON: {error}", "take the file as published") from error


def _with_options(stem: str, letters: Mapping[str, str]) -> str:
    return stem + "\n\n" + "\n".join(f"{name}. {text}" for name, text in letters.items())


def _text(row: Mapping[str, Any], place: str, *names: str) -> str:
    """The first of the named columns that holds text."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
    wanted = " or ".join(map(repr, names))
    raise DataError(f"{place}: no text in {wanted}; it has {sorted(row)}", "take the file as published")


def _answer(row: Mapping[str, Any], place: str, *names: str) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    raise DataError(f"{place}: no answer in {' or '.join(map(repr, names))}", "take the file as published")
