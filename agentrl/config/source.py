"""YAML text to plain values with the line of every key.

Scalars follow YAML 1.2: `1e-5` is a number, only `true` and `false` are booleans (`no`, `off` and `on` are text), dates
are text, and a number with a leading zero is text. Tags, merge keys and duplicate keys are refused.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.problems import Mark, Problem, RecipeError, shown

KeyPath = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
_MAX_VALUES = 20_000
_STR_TAG = "tag:yaml.org,2002:str"
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:(true|True|TRUE)|(false|False|FALSE))$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$")
_NOT_FINITE = re.compile(r"^[-+]?\.(?:inf|Inf|INF|nan|NaN|NAN)$")
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9_]+$")


def read_text(path: Path, label: str) -> str:
    """The text of a recipe file. Raises `RecipeError` for what is no readable, small UTF-8 file."""

    def refuse(message: str, fix: str, line: int | None = None) -> RecipeError:
        return RecipeError([Problem(Mark(label, line), "", message, fix)])

    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise refuse(
                f"{size} bytes, too long for a recipe ({MAX_BYTES} at most)", "name the recipe, not a data file"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror})", "check the path and its permissions") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"not UTF-8 text (byte 0x{raw[error.start]:02x})"
        raise refuse(message, "save the file as UTF-8", line) from error


def parse(text: str, mark: Mark) -> tuple[Any, dict[KeyPath, int]]:
    """The value that YAML text stands for, and the line (from 1) of every key and list item by its path.

    `mark` names the text in faults; its line is kept where it has one, else the YAML's own lines count.
    Raises `RecipeError` with every fault found.
    """

    def at(line: int) -> Mark:
        return mark if mark.rank else Mark(mark.label, line, mark.rank)

    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise RecipeError([_syntax(error, text, at)]) from error
    except yaml.YAMLError as error:
        # The reader's own faults carry a position instead of a mark.
        line = text[: error.position].count("\n") + 1 if isinstance(error, yaml.reader.ReaderError) else 1
        problem = Problem(at(line), "", "a character that YAML does not allow", "remove control characters")
        raise RecipeError([problem]) from error
    except RecursionError as error:
        raise RecipeError([Problem(at(1), "", "nested too deeply", "a recipe has a few levels only")]) from error
    if node is None:
        return None, {}
    builder = _Builder(at)
    value = builder.build(node, (), frozenset())
    if builder.problems:
        raise RecipeError(builder.problems)
    return value, builder.lines


def _syntax(error: yaml.MarkedYAMLError, text: str, at: Any) -> Problem:
    where = error.problem_mark or error.context_mark
    line = where.line + 1 if where else 1
    lines = text.splitlines()
    content = lines[line - 1] if line <= len(lines) else ""
    if "\t" in content[: len(content) - len(content.lstrip())] or "'\\t'" in (error.problem or ""):
        return Problem(at(line), "", "a tab where YAML wants spaces", "indent with spaces")
    if "another document" in (error.problem or ""):
        return Problem(at(line), "", "more than one YAML document", "keep one document: remove the `---` line")
    detail = " ".join(f"{error.context or ''} {error.problem or ''}".split())
    return Problem(at(line), "", f"not valid YAML: {detail}", "check indentation, colons and quotes near this line")


class _Builder:
    """Walks composed nodes; collects lines and faults."""

    def __init__(self, at: Any) -> None:
        self._at = at
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._count = 0

    def _fault(self, node: yaml.Node, path: KeyPath, message: str, fix: str) -> None:
        self.problems.append(Problem(self._at(node.start_mark.line + 1), dotted(path), message, fix))

    def build(self, node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Any:
        self._count += 1
        if self._count > _MAX_VALUES or id(node) in above:
            if not self.problems:
                self._fault(node, path, "aliases that repeat themselves without end", "write the values out")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in _COLLECTION_TAGS and node.tag != _STR_TAG:
            self._fault(node, path, f"tags such as {node.tag} are not allowed", "remove the tag")
            return None
        inside = above | {id(node)}
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                items.append(self.build(item, (*path, index), inside))
            return items
        return self._mapping(node, path, inside)

    def _mapping(self, node: yaml.Node, path: KeyPath, above: frozenset[int]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(
                    key_node, path, "a key that is a list or a mapping", "write a plain key followed by a colon"
                )
                continue
            key = str(key_node.value)
            here = (*path, key)
            line = key_node.start_mark.line + 1
            if key == "<<" and key_node.style is None:
                self._fault(key_node, path, "merge keys (<<) are not supported", "write the keys out")
            elif key in result:
                first = self.lines[here]
                self._fault(key_node, here, f"given twice (first on line {first})", "keep one of the two")
            else:
                self.lines[here] = line
                result[key] = self.build(value_node, here, above)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = str(node.value)
        if node.tag != _STR_TAG:
            self._fault(node, path, f"tags such as {node.tag} are not allowed", "remove the tag")
            return None
        if any("\ud800" <= character <= "\udfff" for character in text):
            self._fault(node, path, "half of a surrogate pair", "write the character itself")
            return None
        if node.style is not None:
            return text
        if _NULL.match(text):
            return None
        if boolean := _BOOL.match(text):
            return boolean[1] is not None
        if _LEADING_ZERO.match(text):
            return text
        if _INT.match(text):
            if len(text) > 40:
                self._fault(node, path, "a number with too many digits", "write a smaller number")
                return None
            return int(text.replace("_", ""), 0)
        number = float(text.replace("_", "")) if _FLOAT.match(text) else 0.0
        if _NOT_FINITE.match(text) or not math.isfinite(number):
            self._fault(node, path, f"got {shown(text)}, expected a finite number", "write a finite number")
            return None
        return number if _FLOAT.match(text) else text


def dotted(path: KeyPath) -> str:
    """A path as the user writes it: `agents.solver.tools`."""
    return ".".join(str(part) for part in path)
