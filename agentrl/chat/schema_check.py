"""A small check of a tool call's arguments against the tool's JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def type_name(schema: Mapping[str, Any]) -> str:
    """A schema's type in words: "string", "array of string", "string or null"."""
    kind = schema.get("type")
    if kind is None:
        return "any value"
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and schema.get("items", {}).get("type"):
        return f"array of {type_name(schema['items'])}"
    return str(kind)


def fault_of(value: Any, schema: Mapping[str, Any], where: str = "arguments") -> str | None:
    """What is wrong with a value, in words for the model; None when it fits.

    Checked: `type` (one or several), `required`, `properties`, `additionalProperties: false`, `items`, `enum`. Other
    keywords are the tool's own matter. A boolean is no number.
    """
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is_a(value, kind) for kind in kinds):
            return f"{where} must be {type_name(schema)}, not {_kind_of(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {schema['enum']}"
    if isinstance(value, dict):
        return _object_fault(value, schema, where)
    if isinstance(value, list) and "items" in schema:
        faults = (fault_of(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value))
        return next((fault for fault in faults if fault is not None), None)
    return None


def _object_fault(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    properties = schema.get("properties", {})
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        return f"{where} lacks {', '.join(repr(k) for k in missing)}"
    unknown = [key for key in value if key not in properties]
    if unknown and schema.get("additionalProperties", True) is False:
        return f"{where} has unknown {', '.join(repr(k) for k in unknown)}"
    faults = (fault_of(value[key], properties[key], f"{where}.{key}") for key in value if key in properties)
    return next((fault for fault in faults if fault is not None), None)


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


def _kind_of(value: Any) -> str:
    names = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
    return names.get(type(value).__name__, "null")
