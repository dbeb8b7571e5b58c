"""`agentrl mappa infer`: answer questions of the user's, and show who said what on the way."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.recipes.asking import answer_all, asked
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.setup import make_workflow, window
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import open_run, open_session
from agentrl.run import Run
from agentrl.types import Task


def infer(recipe: MappaRecipe, options: VerbOptions) -> dict[str, Any]:
    """Answer `--question`, or every row of `--input`, with `run.eval_temperature`.

    Returns the answers in the order asked, each with its trace; the trajectories lie in the run folder. Raises
    `DataError` for an input file that is malformed, naming the line.
    """
    tasks = asked(recipe, options.question, options.input_file)
    with (
        open_run(recipe, "infer") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_infer(recipe, options, run, tasks))


async def _infer(recipe: MappaRecipe, options: VerbOptions, run: Run, tasks: list[Task]) -> dict[str, Any]:
    async with open_session(recipe, seed=recipe.run.seed, window=window(recipe)) as session:
        workflow = make_workflow(recipe, session, temperature=recipe.run.eval_temperature)
        return await answer_all(recipe, options, session, run, workflow, tasks)
