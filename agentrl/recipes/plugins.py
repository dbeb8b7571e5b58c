"""A user's own reward, tool or script, named `module:function` in YAML."""

from __future__ import annotations

import importlib
from typing import Any

from agentrl.errors import ConfigError


def plugin(key: str, target: str) -> Any:
    """Call the function that `target` names, and return what it makes. Raises `ConfigError` naming the key."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{key}: {target!r} is neither built in nor module:function", "name it module:function")
    try:
        return vars(importlib.import_module(module))[name]()
    except (ImportError, KeyError) as error:
        raise ConfigError(
            f"{key}: {target!r} cannot be loaded: {error}", "name it module:function, importable from here"
        ) from error
