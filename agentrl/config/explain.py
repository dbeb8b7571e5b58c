"""What a schema accepts, in words: expectations, the nearest valid key, where a key belongs."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.config.problems import shown, shown_names
from agentrl.config.source import KeyPath, dotted

_MAX_DEPTH = 6


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, flat; any other annotation alone. `Annotated` is unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(member for arg in get_args(annotation) for member in alternatives(arg))
    return (annotation,)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def models_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections among an annotation's alternatives."""
    return tuple(member for member in alternatives(annotation) if _is_model(member))


def annotations_at(schema: type[BaseModel], path: KeyPath) -> tuple[Any, ...]:
    """Every annotation that a value at `path` may have; empty where the schema knows no such place."""
    current: tuple[Any, ...] = (schema,)
    for part in path:
        following: list[Any] = []
        for annotation in current:
            following.extend(_below(annotation, part))
        current = tuple(following)
    return current


def _below(annotation: Any, part: str | int) -> Iterator[Any]:
    for member in alternatives(annotation):
        if _is_model(member):
            if part in member.model_fields:
                yield member.model_fields[str(part)].annotation
        elif get_origin(member) in (dict, Mapping) and isinstance(part, str):
            yield get_args(member)[1]
        elif get_origin(member) in (tuple, list, Sequence) and isinstance(part, int):
            args = [arg for arg in get_args(member) if arg is not Ellipsis]
            if args:
                yield args[min(part, len(args) - 1)]


def accepts_null(schema: type[BaseModel], path: KeyPath) -> bool:
    return any(type(None) in alternatives(annotation) for annotation in annotations_at(schema, path))


def is_section(schema: type[BaseModel], path: KeyPath) -> bool:
    """Whether keys may stand below `path`: a section or a mapping of names."""
    return any(
        _is_model(member) or get_origin(member) in (dict, Mapping)
        for annotation in annotations_at(schema, path)
        for member in alternatives(annotation)
    )


def field_at(schema: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The field that `path` ends in, where it ends in one."""
    if not path:
        return None
    for annotation in annotations_at(schema, path[:-1]):
        for model in models_in(annotation):
            if path[-1] in model.model_fields:
                return model.model_fields[str(path[-1])]
    return None


def expectation(schema: type[BaseModel], path: KeyPath) -> str:
    """What the schema wants at `path`, in words; empty where it knows no such place."""
    field = field_at(schema, path)
    if field is not None:
        return describe(field.annotation, field.metadata)
    words = [describe(annotation) for annotation in annotations_at(schema, path)]
    return " or ".join(dict.fromkeys(words))


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in words, with its bounds: `a whole number of at least 1, or null`."""
    if get_origin(annotation) is Annotated:
        metadata = (*get_args(annotation)[1:], *metadata)
    members = alternatives(annotation)
    words = [_member(member) for member in members if member is not type(None)]
    text = " or ".join(dict.fromkeys(words))
    bounds = [_bound(item) for item in metadata]
    text = " ".join([text, " and ".join(bound for bound in bounds if bound)]).strip()
    return f"{text}, or null" if type(None) in members else text


def _bound(item: Any) -> str:
    match item:
        case Ge(ge=value):
            return f"of at least {value}"
        case Gt(gt=value):
            return f"above {value}"
        case Le(le=value):
            return f"of at most {value}"
        case Lt(lt=value):
            return f"below {value}"
        case _:
            return ""


def _member(member: Any) -> str:
    origin, args = get_origin(member), get_args(member)
    if member in (bool, int, float, str):
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[member]
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(arg) for arg in args)
    if origin in (list, Sequence) or (origin is tuple and args[-1] is Ellipsis):
        return f"a list, each item {describe(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} items"
    if origin in (dict, Mapping):
        return f"a mapping of names, each to {describe(args[1])}"
    if _is_model(member):
        return f"a section with the keys {shown_names(member.model_fields)}"
    return str(getattr(member, "__name__", member))  # a type that is neither of the above names itself


def keys_of(schema: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """The valid keys of the section at `path`."""
    found = (
        name
        for annotation in annotations_at(schema, path)
        for model in models_in(annotation)
        for name in model.model_fields
    )
    return tuple(dict.fromkeys(found))


def all_keys(schema: type[BaseModel], prefix: KeyPath = (), depth: int = 0) -> Iterator[KeyPath]:
    """Every dotted place of a schema; a mapping of names is entered as `NAME`."""
    if depth > _MAX_DEPTH:
        return
    for name, field in schema.model_fields.items():
        here = (*prefix, name)
        yield here
        for member in alternatives(field.annotation):
            if _is_model(member):
                yield from all_keys(member, here, depth + 1)
            elif get_origin(member) in (dict, Mapping):
                for model in models_in(get_args(member)[1]):
                    yield from all_keys(model, (*here, "NAME"), depth + 1)


def unknown_key_fix(schema: type[BaseModel], path: KeyPath) -> str:
    """What the writer of an unknown key may have meant: a near key here, the same key elsewhere, or the list."""
    section, key = path[:-1], str(path[-1])
    here = keys_of(schema, section)
    if near := difflib.get_close_matches(key, here, n=1, cutoff=0.8):
        return f"did you mean {dotted((*section, near[0]))}?"
    elsewhere = [place for place in all_keys(schema) if place[-1] == key and place[:-1] != section]
    if elsewhere:
        # The shallowest place is the likeliest; three are enough to choose from.
        places = sorted(elsewhere, key=len)[:3]
        return f"{key} belongs elsewhere: {' or '.join(dotted(place) for place in places)}"
    if near := difflib.get_close_matches(key, here, n=1, cutoff=0.5):
        return f"did you mean {dotted((*section, near[0]))}?"
    leaves = {str(place[-1]): place for place in all_keys(schema)}
    if near := difflib.get_close_matches(key, leaves, n=1, cutoff=0.75):
        return f"did you mean {dotted(leaves[near[0]])}?"
    return f"valid keys here: {shown_names(here)}" if here else "remove it"


def wrong_value_fix(schema: type[BaseModel], path: KeyPath, value: Any) -> str:
    """How to write a refused value so that it is taken, where the mistake is a usual one."""
    key = str(path[-1]) if path else ""
    members = {member for annotation in annotations_at(schema, path) for member in alternatives(annotation)}
    wants_number = bool(members & {int, float}) and str not in members
    if isinstance(value, str):
        if bool in members and value.lower() in ("yes", "on", "y", "no", "off", "n", "true", "false"):
            return f"write {key}: {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'}"
        if wants_number and (number := _as_number(value, float not in members)) is not None:
            return f"drop the quotes and leading zeros: write {key}: {number}"
    if isinstance(value, float) and int in members and float not in members and value.is_integer():
        return f"write it in whole digits: {key}: {int(value)}"
    if str in members and isinstance(value, (int, float, bool)):
        return f'put it in quotes: {key}: "{shown(value)}"'
    if value is not None and not isinstance(value, (list, dict)):
        literals = [str(a) for m in members if get_origin(m) is Literal for a in get_args(m)]
        if near := difflib.get_close_matches(str(value), literals, n=1, cutoff=0.6):
            return f"did you mean {key}: {near[0]}?"
        if any(get_origin(member) in (tuple, list) for member in members):
            return f"write a list: {key}: [{value}]"
    wanted = expectation(schema, path)
    return f"set {dotted(path)} to {wanted}" if wanted else f"change {dotted(path)}"


def _as_number(text: str, whole: bool) -> int | float | None:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
