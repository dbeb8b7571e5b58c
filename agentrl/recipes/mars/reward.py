"""What is good in MARS: one reward per trajectory, judged at its end (section 6.1)."""

from __future__ import annotations

from agentrl.errors import MissingError
from agentrl.grading.qa import F1, ExactMatch
from agentrl.protocols import Reward
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.plugins import plugin


def make_reward(recipe: MarsRecipe) -> Reward:
    """The reward that `recipe.reward` names. Raises `MissingError` for the judge and `ConfigError` for a bad name."""
    if recipe.reward == "exact_match":
        return ExactMatch()
    if recipe.reward == "f1":
        return F1()
    if recipe.reward == "judge":
        raise MissingError("this version has no judge", "set reward: exact_match (and judge to null), or --smoke")
    reward: Reward = plugin("reward", recipe.reward)
    return reward
