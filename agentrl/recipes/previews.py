"""What `check --show-sample` needs of every method: a session without weights, one rollout in it, and samples cut up.

Tokenizers and templates are the models' own; replies are scripted, so no weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from agentrl.chat.format import ChatFormat
from agentrl.config.schema import BaseRecipe, LaunchConfig
from agentrl.errors import MissingError, RunFailedError
from agentrl.launch.devices import detect, plan
from agentrl.models import TINY_NAMES, find
from agentrl.protocols import Tool
from agentrl.recipes.registry import Preview
from agentrl.recipes.session import Session, model_folder
from agentrl.rollout.gate import Gate
from agentrl.rollout.runner import Job, Workflow, run_jobs
from agentrl.rollout.scripted import Reply, ScriptedEngine
from agentrl.types import MaskReason, Sample, Task, Trajectory


def refuse_absent_models(recipe: BaseRecipe) -> None:
    """Raises `MissingError` for a model that is not on this machine, instead of fetching it."""
    for model in recipe.policy_models.values():
        if model.checkpoint is None and model.name not in TINY_NAMES and find(model.name) is None:
            raise MissingError(f"{model.name} is not on this machine yet", f"agentrl models prepare {model.name}")


def scripted_session(recipe: BaseRecipe, reply: Reply, tools: Mapping[str, Tool], window: int) -> Session:
    """A session whose every policy says what `reply` writes."""
    folders = {name: model_folder(model, name, recipe.run.dir) for name, model in recipe.policy_models.items()}
    formats = {name: ChatFormat.from_folder(folder) for name, folder in folders.items()}
    gate = Gate()
    engine = ScriptedEngine.from_folders(reply, folders, gate=gate, max_model_len=window)
    return Session(plan(LaunchConfig(gpus=0), detect()), folders, engine, gate, tools, formats)


async def one_rollout(session: Session, workflow: Workflow, task: Task) -> Trajectory:
    """One rollout of a task. Raises `RunFailedError` with its reason when it fails."""
    [trajectory] = await run_jobs(
        [Job(task, 0, "preview", 0)],
        workflow,
        engine=session.engine,
        gate=session.gate,
        tools=session.tools,
        max_concurrent=1,
    )
    if trajectory.status == "failed":
        raise RunFailedError(f"the sample rollout failed: {trajectory.status_reason}", "raise the agents' budgets")
    return trajectory


def preview_of(sample: Sample, format_: ChatFormat) -> Preview:
    """A sample as text, cut where the loss mask changes."""
    parts: list[tuple[str, MaskReason | None]] = []
    at = 0
    for reason, run in groupby(sample.reasons):
        length = len(list(run))
        parts.append((format_.decode(sample.ids[at : at + length]), reason))
        at += length
    title = f"{sample.agent} on policy {sample.policy}: {len(sample.ids)} tokens, {sample.num_trained} trained"
    return Preview(title, tuple(parts))
