"""A user's own reward, tool or script, named `module:function` in YAML."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from agentrl.errors import AgentRLError, ConfigError
from agentrl.protocols import Reward


def named_function(key: str, target: str) -> Callable[..., Any]:
    """The function that `target` names. Raises `ConfigError` naming the key where there is none."""
    module, colon, name = target.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
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

    Raises `ConfigError` naming the key where there is no such function, it takes arguments, or it raises.
    """
    function = named_function(key, target)
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        wanted = "write a function without arguments that returns it"
        raise ConfigError(f"{key}: {target!r} cannot be called without arguments: {error}", wanted) from error
    try:
        return function()
    except AgentRLError:
        raise
    except Exception as error:  # the user's own code may raise anything: it becomes a fault of that key
        raise ConfigError(
            f"{key}: {target!r} raised {type(error).__name__}: {error}", "repair it; --debug shows the trace"
        ) from error


def reward_plugin(key: str, target: str) -> Reward:
    """The user's reward that `target` makes.

    Raises `ConfigError` as `plugin` does, and where it has no async `score`.
    """
    made = plugin(key, target)
    score = getattr(made, "score", None)
    call = score if inspect.isroutine(score) or not callable(score) else score.__call__
    if not inspect.iscoroutinefunction(inspect.unwrap(call) if callable(call) else call):
        what = "has no `score`" if score is None else "has a `score` that is not async"
        raise ConfigError(
            f"{key}: what {target!r} returns ({type(made).__name__}) {what}",
            "return an object with `async def score(self, task, trajectory) -> Score`",
        )
    reward: Reward = made
    return reward
