"""What is good in MARS: one reward per trajectory, judged at its end (section 6.1)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentrl.errors import MissingError
from agentrl.grading.qa import F1, ExactMatch
from agentrl.protocols import Reward
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.plugins import reward_plugin
from agentrl.scoring.judge import JudgeReward, run_canaries


@asynccontextmanager
async def open_reward(recipe: MarsRecipe, note: Callable[[str], None]) -> AsyncIterator[Reward]:
    """The reward that `recipe.reward` names, closed at the end.

    A judge first rules on its canary items: one that answers none of them ends the command (`MissingError`) before
    any model loads, one that rules wrongly is told of. Raises `ConfigError` for a bad name and `MissingError` without
    the judge's API key.
    """
    if recipe.judge is None:
        yield _plain_reward(recipe)
        return
    reward = JudgeReward.from_config(recipe.judge)
    try:
        if recipe.judge.canaries:
            await _try_canaries(reward, note)
        yield reward
    finally:
        await reward.close()


def _plain_reward(recipe: MarsRecipe) -> Reward:
    if recipe.reward == "exact_match":
        return ExactMatch()
    if recipe.reward == "f1":
        return F1()
    return reward_plugin("reward", recipe.reward)


async def _try_canaries(reward: JudgeReward, note: Callable[[str], None]) -> None:
    report = await run_canaries(reward.judge)
    if len(report.missing) == report.num_items:
        why = next(iter(report.missing.values()))
        raise MissingError(
            f"the judge ruled on none of {report.num_items} items with known verdicts: {why}",
            "check judge.base_url, judge.model and that the service runs (agentrl check --deep RECIPE)",
        )
    if report.wrong or report.missing:
        wrong, silent = ", ".join(report.wrong) or "none", ", ".join(report.missing) or "none"
        note(f"the judge's {report.num_items} items with known verdicts: ruled wrongly: {wrong}; not ruled: {silent}")
