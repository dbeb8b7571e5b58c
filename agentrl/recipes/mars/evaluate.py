"""`agentrl mars eval`: the held-out tasks, once each, with the same workflow and grader as in training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from agentrl.grading.interval import eval_block
from agentrl.protocols import Reward
from agentrl.recipes.collect import collect, jobs_for, rollout_metrics, total_counts
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.reward import open_reward
from agentrl.recipes.mars.setup import eval_tasks, make_workflow, window
from agentrl.recipes.records import untrained_records
from agentrl.recipes.registry import Progress, VerbOptions
from agentrl.recipes.session import Session, open_run, open_session
from agentrl.run import Run
from agentrl.types import Task


async def evaluate_once(
    recipe: MarsRecipe,
    session: Session,
    reward: Reward,
    tasks: Sequence[Task],
    run: Run,
    step: int,
    progress: Progress,
) -> dict[str, float | None]:
    """Score of each task, by id; None where it is missing. The trajectories go to `evals/step_NNNNNN.jsonl`."""
    workflow = make_workflow(recipe, session, temperature=recipe.run.eval_temperature)
    collected = await collect(
        session,
        jobs_for(tasks, 1, "eval", step),
        workflow,
        reward,
        max_concurrent=recipe.rollout.max_concurrent,
        progress=progress,
        label="evaluation",
    )
    lines = [json.dumps(record, ensure_ascii=False) for record in untrained_records(collected.scored)]
    run.write_file(f"evals/step_{step:06d}.jsonl", "".join(line + "\n" for line in lines))
    return {s.trajectory.task.id: s.outcome.value for s in collected.scored}


def evaluate(recipe: MarsRecipe, options: VerbOptions) -> dict[str, Any]:
    """Evaluate the recipe's model or checkpoint and return the summary: score, k of n, interval, tokens and times."""
    with (
        open_run(recipe, "eval") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_evaluate(recipe, options, run))


async def _evaluate(recipe: MarsRecipe, options: VerbOptions, run: Run) -> dict[str, Any]:
    tasks = eval_tasks(recipe)
    async with (
        open_reward(recipe, options.progress.note) as reward,
        open_session(recipe, seed=recipe.run.seed, window=window(recipe)) as session,
    ):
        workflow = make_workflow(recipe, session, temperature=recipe.run.eval_temperature)
        writer = run.open_step(0)
        collected = await collect(
            session,
            jobs_for(tasks, 1, "eval", 0),
            workflow,
            reward,
            max_concurrent=recipe.rollout.max_concurrent,
            writer=writer,
            progress=options.progress,
            label="evaluation",
        )
        writer.commit(untrained_records(collected.scored, save_prompt_ids=recipe.run.save_prompt_ids))
    result = {
        "method": "mars",
        "engine": recipe.engine.kind,
        "eval": eval_block({s.trajectory.task.id: s.outcome.value for s in collected.scored}),
        "rollouts": rollout_metrics(collected),
        "counts": dict(sorted(total_counts(collected.scored).items())),
    }
    run.write_summary(result)
    return {"run": str(run.path), **result}
