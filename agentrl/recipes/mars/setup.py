"""Recipe -> the parts of a MARS run: workflow, tasks, window, samples."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.chat.context import Chat
from agentrl.chat.tool_calls import check_tag_tools
from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks
from agentrl.errors import DataError
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.prompts import tool_schemas
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.workflow import MarsWorkflow
from agentrl.recipes.session import Session, chosen
from agentrl.types import MaskReason, Sample, ScoredTrajectory, Task
from agentrl.update.samples import to_samples


def window(recipe: MarsRecipe) -> int:
    """The longest context of either role, in tokens."""
    return max(a.max_prompt_tokens + a.max_response_tokens for a in recipe.agents.values())


def make_workflow(recipe: MarsRecipe, session: Session, temperature: float | None = None) -> MarsWorkflow:
    """The workflow on a session's tools and chats. Raises `ConfigError` for a tool the tag syntax cannot call."""
    tools = chosen(session.tools, recipe.system2_tools)
    if recipe.mars.call_syntax == "tag":
        check_tag_tools(tool_schemas(tools))
    chats: Mapping[str, Chat] = {
        SYSTEM2: session.chat(recipe.agents[SYSTEM2].policy, recipe.mars.enable_thinking),
        SYSTEM1: session.chat(recipe.agents[SYSTEM1].policy, False),
    }
    return MarsWorkflow(recipe, chats, tools, temperature)


def samples_of(recipe: MarsRecipe, scored: ScoredTrajectory) -> list[Sample]:
    """One System 2 sample and one System 1 sample per bin; a role that is not trained is masked FROZEN."""

    def fate(agent: str) -> MaskReason | None:
        frozen = recipe.policy_models[recipe.agents[agent].policy].mode == "frozen"
        left_out = recipe.mars.train not in ("both", agent)
        return MaskReason.FROZEN if frozen or left_out else None

    return to_samples(scored, part_of=str, fate_of=fate, constrained=recipe.algorithm.constrained)


def train_tasks(recipe: MarsRecipe) -> list[Task]:
    return _tasks(recipe, recipe.data, "data.path")


def eval_tasks(recipe: MarsRecipe) -> list[Task]:
    """The held-out tasks. Raises `DataError` when none are named."""
    return _tasks(recipe, recipe.data.eval, "data.eval.path")


def _tasks(recipe: MarsRecipe, config: DatasetConfig, key: str) -> list[Task]:
    if config.path is None:
        raise DataError(f"{key}: no data set is named", f"set {key} to a file or an embedded set (agentrl data list)")
    return load_tasks(config)
