"""`agentrl mappa rollout`: record one step's rollouts with their scores, for a look or for `train --from-rollouts`."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.data import order
from agentrl.recipes.collect import collect, jobs_for, rollout_metrics, total_counts
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.mappa.coaching import open_coaching
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.metrics import coach_metrics
from agentrl.recipes.mappa.setup import make_workflow, open_reward, train_tasks, window
from agentrl.recipes.records import untrained_records
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import open_run, open_session
from agentrl.run import Run

FIRST_STEP = 1


def rollout(recipe: MappaRecipe, options: VerbOptions) -> dict[str, Any]:
    """Roll out the questions of the first step as training would, coach and record them; no weight changes.

    `rollout.questions_per_step` and `rollout.group_size` say how many. Prompt ids are always recorded.
    """
    with (
        open_run(recipe, "rollout") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_rollout(recipe, options, run))


async def _rollout(recipe: MappaRecipe, options: VerbOptions, run: Run) -> dict[str, Any]:
    tasks = order(
        train_tasks(recipe),
        recipe.run.seed,
        FIRST_STEP,
        recipe.rollout.questions_per_step,
        shuffle=recipe.data.shuffle,
    )
    async with (
        open_reward(recipe) as reward,
        open_coaching(recipe) as coaching,
        open_session(recipe, seed=recipe.run.seed, window=window(recipe)) as session,
    ):
        writer = run.open_step(FIRST_STEP)
        collected = await collect(
            session,
            jobs_for(tasks, recipe.rollout.group_size, "train", FIRST_STEP),
            make_workflow(recipe, session, watch=coaching.watch),
            reward,
            max_concurrent=recipe.rollout.max_concurrent,
            writer=writer,
            progress=options.progress,
            score_actions=coaching.scores,
        )
        path = writer.commit(untrained_records(collected.scored, save_prompt_ids=True))
    result = {
        "method": "mappa",
        "engine": recipe.engine.kind,
        "questions": len(tasks),
        "rollouts": rollout_metrics(collected) | coach_metrics(recipe, collected.scored),
        "counts": dict(sorted(total_counts(collected.scored).items())),
        "trajectories": str(path),
    }
    run.write_summary(result)
    return {"run": str(run.path), **result}
