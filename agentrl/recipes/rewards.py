"""Outcome graders by name, opened and closed around a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from agentrl.grading.choice import Choice
from agentrl.grading.code import CodeGrader
from agentrl.grading.math import MathGrader
from agentrl.grading.qa import F1, ExactMatch
from agentrl.protocols import Reward
from agentrl.recipes.plugins import reward_plugin

BUILT_IN: Mapping[str, Callable[[], Reward]] = MappingProxyType(
    {"exact_match": ExactMatch, "f1": F1, "choice": Choice, "code": CodeGrader, "math": MathGrader}
)


@asynccontextmanager
async def open_reward(name: str) -> AsyncIterator[Reward]:
    """A built-in grader, or a user's `module:function`, closed at the end. Raises `ConfigError` for a bad name."""
    reward = BUILT_IN[name]() if name in BUILT_IN else reward_plugin("reward", name)
    try:
        yield reward
    finally:
        if isinstance(reward, MathGrader):
            reward.close()
