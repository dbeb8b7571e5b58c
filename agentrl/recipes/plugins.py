"""A user's own reward, tool or script, named `module:function` in YAML."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from agentrl.errors import ConfigError


def named_function(key: str, target: str) -> Callable[..., Any]:
    """The function that `target` names. Raises `ConfigError` naming the key where there is none."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{key}: {target!r} is neither built in nor module:function", "name it module:function")
    fix = "name it module:function, importable from here"
    try:
        function = vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise ConfigError(f"{key}: {target!r} cannot be loaded: {error}", fix) from error
    if not callable(function):
        raise ConfigError(f"{key}: {target!r} is {type(function).__name__}, not a function", fix)
    found: Callable[..., Any] = function
    return found


def plugin(key: str, target: str) -> Any:
    """Call the function that `target` names, without arguments, and return what it makes.

    Raises `ConfigError` naming the key where there is no such function or it takes arguments; what the function itself
    raises passes through.
    """
    function = named_function(key, target)
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        wanted = "write a function without arguments that returns it"
        raise ConfigError(f"{key}: {target!r} cannot be called without arguments: {error}", wanted) from error
    return function()
