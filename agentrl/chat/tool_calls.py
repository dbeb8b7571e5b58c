"""Tool calls and answers in sampled text: two syntaxes behind one parser, and the grammar that forces one of them.

Only text outside thinking counts. A faulty call becomes an error with words for the model, never an exception: about a
quarter of a young policy's calls are malformed. `index` counts the attempts of one completion in the order of the
text, over calls and errors alike, so that replies can be paired with calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from agentrl.chat.schema_check import fault_of, type_name
from agentrl.errors import ConfigError
from agentrl.types import Grammar

Syntax = Literal["hermes", "tag"]
Tools = Mapping[str, Mapping[str, Any]]
Fault = Literal["malformed", "unclosed", "unknown_tool", "arguments", "purpose", "empty_answer"]

_RESERVED = ("answer", "think", "tool_call", "tool_response")
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that may be executed: a known tool, arguments that fit its schema, a purpose where one is required."""

    name: str
    arguments: dict[str, Any]
    purpose: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class CallError:
    """A call, or an answer, that cannot be used. `message` tells the model what is wrong and what the right form is."""

    kind: Fault
    message: str
    name: str | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class ParseResult:
    """What a completion asks for. `answer` is the last complete one, stripped, or None."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()
    answer: str | None = None


class _CallFault(Exception):
    def __init__(self, kind: Fault, problem: str, name: str | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.name = kind, problem, name
        self.read_up_to = 0  # text before this place is the faulty call's own and must not be read as anything else


@dataclass(slots=True)
class _Found:
    syntax: Syntax
    tools: Tools
    require_purpose: bool
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)
    answer: str | None = None

    @property
    def attempts(self) -> int:
        return len(self.calls) + len(self.errors)

    def add(self, name: str, arguments: dict[str, Any], purpose: str) -> None:
        self.calls.append(ToolCall(name, arguments, purpose, self.attempts))

    def fail(self, fault: _CallFault) -> None:
        form = usage(self.syntax, self.tools, fault.name, self.require_purpose)
        if fault.kind == "empty_answer" or fault.name == "answer":
            form = "<answer>ANSWER</answer>"
        message = f"{fault.problem}. The right form is: {form}"
        self.errors.append(CallError(fault.kind, message, fault.name, self.attempts))


_EndOf = Callable[[str, re.Match[str], _Found, re.Pattern[str]], int]


def parse(text: str, syntax: Syntax, tools: Tools, require_purpose: bool = True) -> ParseResult:
    """Read the calls and the answer of one completion.

    `tools` maps each name to the JSON schema of its arguments. Hermes: `<tool_call>{"name", "arguments",
    "purpose"}</tool_call>`. Tag: `<search>QUERY | PURPOSE</search>`, split at the last `|`; without
    `require_purpose` the whole body is the query. The answer is `<answer>...</answer>` in both. Raises `ConfigError`
    when a tool does not fit the tag syntax.
    """
    if syntax == "tag":
        check_tag_tools(tools)
    found = _Found(syntax, tools, require_purpose)
    visible = without_thinking(text)
    if syntax == "hermes":
        _scan(visible, ("tool_call",), found, _hermes_end)
    else:
        _scan(visible, tuple(tools), found, _tag_end)
    return ParseResult(tuple(found.calls), tuple(found.errors), found.answer)


def without_thinking(text: str) -> str:
    """The text outside `<think>...</think>`.

    An unclosed opening tag hides the rest. A closing tag alone hides everything before it: the opening one stood in
    the generation prompt. Tags inside the JSON of a tool call are part of it.
    """
    kept: list[str] = []
    at = 0
    for tag in _think_tags(text):
        if tag.start() < at:
            continue
        if tag.group() == _THINK_CLOSE:
            kept.clear()
            at = tag.end()
            continue
        kept.append(text[at : tag.start()])
        close = text.find(_THINK_CLOSE, tag.end())
        if close < 0:
            return "".join(kept)
        at = close + len(_THINK_CLOSE)
    return "".join([*kept, text[at:]])


def _think_tags(text: str) -> Iterator[re.Match[str]]:
    """Thinking tags outside the JSON of tool calls; those inside a thinking span are passed on, for the caller."""
    if _THINK_OPEN not in text and _THINK_CLOSE not in text:
        return
    pattern = re.compile(r"<think>|</think>|<tool_call>")
    thinking, at = False, 0
    while (tag := pattern.search(text, at)) is not None:
        at = tag.end()
        if tag.group() == "<tool_call>":
            if not thinking:
                decoded = _decode_json(text, at)
                at = at if isinstance(decoded, str) else decoded[1]
            continue
        thinking = tag.group() == _THINK_OPEN
        yield tag


def _scan(text: str, names: tuple[str, ...], found: _Found, end_of: _EndOf) -> None:
    """Walk the opening tags in order. `end_of` reads one call and tells where it ends; a call's body is opaque."""
    calls = re.compile("<(" + "|".join(re.escape(n) for n in names) + ")>") if names else re.compile(r"(?!)")
    either = re.compile("<(" + "|".join(re.escape(n) for n in (*names, "answer")) + ")>")
    at = 0
    while (tag := either.search(text, at)) is not None:
        if tag[1] == "answer":
            at = _answer_end(text, tag, found)
            continue
        try:
            at = end_of(text, tag, found, calls)
        except _CallFault as fault:
            found.fail(fault)
            at = max(tag.end(), fault.read_up_to)
            close = _closing(text, tag[1], at, calls)
            at = at if close < 0 else close + len(tag[1]) + 3


def _closing(text: str, name: str, at: int, calls: re.Pattern[str]) -> int:
    """Where a call's closing tag stands, -1 if another call opens before it."""
    following = calls.search(text, at)
    return text.find(f"</{name}>", at, len(text) if following is None else following.start())


def _answer_end(text: str, tag: re.Match[str], found: _Found) -> int:
    close = text.find("</answer>", tag.end())
    if close < 0:
        found.fail(_CallFault("unclosed", "the answer is not closed", "answer"))
        return tag.end()
    answer = text[tag.end() : close].strip()
    if answer:
        found.answer = answer
    else:
        found.fail(_CallFault("empty_answer", "the answer is empty", "answer"))
    return close + len("</answer>")


# Hermes


def _hermes_end(text: str, tag: re.Match[str], found: _Found, calls: re.Pattern[str]) -> int:
    decoded = _decode_json(text, tag.end())
    end = tag.end() if isinstance(decoded, str) else decoded[1]
    close = _closing(text, "tool_call", end, calls)
    try:
        if close < 0:
            raise _CallFault("unclosed", "the tool call is not closed: </tool_call> is missing")
        if isinstance(decoded, str):
            raise _CallFault("malformed", f"the tool call is not valid JSON ({decoded})")
        if text[end:close].strip():
            raise _CallFault("malformed", "the tool call has text after its JSON object")
        found.add(*_checked(decoded[0], found))
    except _CallFault as fault:
        fault.read_up_to = end
        raise
    return close + len("</tool_call>")


def _decode_json(text: str, at: int) -> tuple[Any, int] | str:
    """The JSON value at a place and where it ends, or what is wrong with it."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    start = re.compile(r"\s*").match(text, at)
    try:
        return json.JSONDecoder(parse_constant=refuse).raw_decode(text, start.end() if start else at)
    except json.JSONDecodeError as fault:
        return f"{fault.msg} at character {fault.pos - at}"
    except RecursionError:
        return "nested too deeply"
    except ValueError as fault:
        return str(fault)


def _checked(value: Any, found: _Found) -> tuple[str, dict[str, Any], str]:
    if not isinstance(value, dict):
        raise _CallFault("malformed", "the tool call must be one JSON object")
    name = value.get("name")
    if not isinstance(name, str):
        raise _CallFault("malformed", '"name" must be a string that names a tool')
    if name not in found.tools:
        raise _CallFault(
            "unknown_tool", f"there is no tool {name[:60]!r}, only {', '.join(found.tools) or 'none'}", None
        )
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise _CallFault("arguments", '"arguments" must be a JSON object', name)
    if (fault := fault_of(arguments, found.tools[name])) is not None:
        raise _CallFault("arguments", fault, name)
    purpose = value.get("purpose", "")
    if not isinstance(purpose, str):
        raise _CallFault("purpose", '"purpose" must be a string', name)
    if found.require_purpose and not purpose.strip():
        raise _CallFault("purpose", '"purpose" is missing or empty: say what you need to learn and why', name)
    return name, arguments, purpose.strip()


# Tag


def check_tag_tools(tools: Tools) -> Mapping[str, str]:
    """Tool -> the one argument that its tag fills. Raises `ConfigError` for a tool that the tag syntax cannot call."""
    out = {}
    for name, schema in tools.items():
        required = list(schema.get("required", ()))
        argument = schema.get("properties", {}).get(required[0], {}) if len(required) == 1 else {}
        if not _takes_string(argument) and type_name(argument) != "array of string":
            raise ConfigError(
                f"tool {name!r} does not fit the tag syntax: it needs exactly one required string or list of strings",
                "use the hermes syntax, or a tool with one required string",
            )
        if name in _RESERVED or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
            raise ConfigError(
                f"tool {name!r} cannot be a tag", f"use letters, digits, - and _, and none of {', '.join(_RESERVED)}"
            )
        out[name] = required[0]
    return out


def _takes_string(argument: Mapping[str, Any]) -> bool:
    kind = argument.get("type")
    return "string" in (kind if isinstance(kind, list) else [kind])


def _tag_end(text: str, tag: re.Match[str], found: _Found, calls: re.Pattern[str]) -> int:
    name = tag[1]
    close = _closing(text, name, tag.end(), calls)
    if close < 0:
        raise _CallFault("unclosed", f"the call is not closed: </{name}> is missing", name)
    body = text[tag.end() : close]
    query, bar, purpose = body.rpartition("|") if found.require_purpose else (body, "", "")
    if found.require_purpose and (not bar or not purpose.strip()):
        raise _CallFault("purpose", "the purpose is missing or empty: say what you need to learn and why", name)
    if not query.strip():
        raise _CallFault("arguments", "the query is empty", name)
    argument = check_tag_tools(found.tools)[name]
    is_list = not _takes_string(found.tools[name]["properties"][argument])
    found.add(name, {argument: [query.strip()] if is_list else query.strip()}, purpose.strip())
    return close + len(name) + 3


# Forms


def usage(syntax: Syntax, tools: Tools, name: str | None = None, require_purpose: bool = True) -> str:
    """The right form of a call to one tool, or to each of them, as the model should write it."""
    names = [name] if name is not None and name in tools else list(tools)
    return " or ".join(_form(syntax, n, tools[n], require_purpose) for n in names)


def _form(syntax: Syntax, name: str, schema: Mapping[str, Any], require_purpose: bool) -> str:
    if syntax == "tag":
        return f"<{name}>QUERY | PURPOSE</{name}>" if require_purpose else f"<{name}>QUERY</{name}>"
    properties = schema.get("properties", {})
    arguments = ", ".join(f'"{k}": <{type_name(properties.get(k, {}))}>' for k in schema.get("required", properties))
    purpose = ', "purpose": "what you need to learn and why"' if require_purpose else ""
    return f'<tool_call>{{"name": "{name}", "arguments": {{{arguments}}}{purpose}}}</tool_call>'


def call_grammar(
    syntax: Syntax,
    tools: Tools,
    answer: bool = True,
    require_purpose: bool = True,
    max_query_chars: int = 120,
    max_purpose_chars: int = 160,
    max_answer_chars: int = 120,
) -> Grammar:
    """A regular expression for a whole completion: exactly one call, or one answer where `answer` allows it.

    Whatever it matches, `parse` reads as that one call or answer without error. Queries, purposes and answers are one
    line each, start with a visible character and hold none of `< > |`. Written for llguidance: no lookaround, no
    anchors. Raises `ConfigError` when the syntax is hermes (its JSON is no matter for very small models), when a tool
    does not fit the tag syntax, or when nothing is left to say.
    """
    if syntax != "tag":
        raise ConfigError("a call grammar needs the tag syntax", "set the call syntax to tag, or drop the grammar")
    check_tag_tools(tools)

    def line(chars: int) -> str:
        return r"[^<>|\s\x00-\x1f\x7f]" + rf"[^<>|\x00-\x1f\x7f\u0085\u2028\u2029]{{0,{chars - 1}}}"

    purpose = rf" \| {line(max_purpose_chars)}" if require_purpose else ""
    forms = [f"<{re.escape(name)}>{line(max_query_chars)}{purpose}</{re.escape(name)}>" for name in tools]
    if answer:
        forms.append(f"<answer>{line(max_answer_chars)}</answer>")
    if not forms:
        raise ConfigError("a call grammar needs a tool or an answer", "name a tool, or allow answers")
    return Grammar("regex", "(" + "|".join(forms) + ")")
