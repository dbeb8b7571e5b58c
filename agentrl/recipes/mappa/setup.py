"""Recipe -> the parts of a MAPPA run: workflow, tasks, window, outcome, samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks, overlap
from agentrl.errors import DataError
from agentrl.grading.choice import Choice
from agentrl.grading.code import CodeGrader
from agentrl.grading.math import MathGrader
from agentrl.grading.qa import F1, ExactMatch
from agentrl.grading.tabular import TableGrader
from agentrl.protocols import Reward
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.samples import TeamSamples, team_samples
from agentrl.recipes.mappa.workflow import TeamWorkflow, Watch
from agentrl.recipes.plugins import reward_plugin
from agentrl.recipes.session import Session
from agentrl.types import Score, ScoredTrajectory, Task, Trajectory

NO_OUTCOME = "no outcome reward is set"


class NoOutcome:
    """The reward of a recipe without one: missing, with that reason."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(None, NO_OUTCOME)


@asynccontextmanager
async def open_reward(recipe: MappaRecipe) -> AsyncIterator[Reward]:
    """The outcome reward that `recipe.reward` names, closed at the end. Raises `ConfigError` for a bad name."""
    built_in: dict[str, Callable[[], Reward]] = {
        "exact_match": ExactMatch,
        "f1": F1,
        "choice": Choice,
        "code": CodeGrader,
        "table": TableGrader,
        "math": MathGrader,
    }
    if recipe.reward is None:
        yield NoOutcome()
        return
    reward: Reward
    if recipe.reward in built_in:
        reward = built_in[recipe.reward]()
    else:
        reward = reward_plugin("reward", recipe.reward)
    try:
        yield reward
    finally:
        if isinstance(reward, MathGrader):
            reward.close()


def window(recipe: MappaRecipe) -> int:
    """The longest context of any agent, in tokens."""
    return max(agent.max_prompt_tokens + agent.max_response_tokens for agent in recipe.agents.values())


def make_workflow(
    recipe: MappaRecipe, session: Session, temperature: float | None = None, watch: Watch | None = None
) -> TeamWorkflow:
    """The team on a session's tools and chats."""
    chats = {name: session.chat(agent.policy) for name, agent in recipe.agents.items()}
    return TeamWorkflow(recipe, chats, session.tools, temperature, watch)


def samples_of(recipe: MappaRecipe, scored: Sequence[ScoredTrajectory]) -> TeamSamples:
    """One sample per visit of an agent, and the rewards; agents on a frozen policy are masked FROZEN."""

    def frozen(agent: str) -> bool:
        return recipe.policy_models[recipe.agents[agent].policy].mode == "frozen"

    return team_samples(scored, recipe.mappa, frozen=frozen, constrained=recipe.algorithm.constrained)


def train_tasks(recipe: MappaRecipe) -> list[Task]:
    return _tasks(recipe.data, "data.path")


def eval_tasks(recipe: MappaRecipe) -> list[Task]:
    """The held-out tasks. Raises `DataError` when none are named."""
    return _tasks(recipe.data.eval, "data.eval.path")


def refuse_leak(tasks: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raises `DataError` when a held-out problem is among the training ones: by its text, whatever its case and
    spacing, or by its contest, year and number (M-32)."""
    shared = overlap(tasks, held_out)
    if shared:
        trained, first = shared[0]
        raise DataError(
            f"data.eval.path: {len(shared)} of its {len(held_out)} questions are trained on too, {first!r} first "
            f"(as {trained!r} in data.path)",
            "name a held-out set without them",
        )


def _tasks(config: DatasetConfig, key: str) -> list[Task]:
    if config.path is None:
        raise DataError(f"{key}: no data set is named", f"set {key} to a file or an embedded set (agentrl data list)")
    tasks = load_tasks(config)
    for task in tasks:
        for name in task.files:
            if not Path(name).is_file():
                raise DataError(f"{key}: task {task.id} names the file {name}, which is not there", "mend the task")
    return tasks
