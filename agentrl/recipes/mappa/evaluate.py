"""`agentrl mappa eval`: the held-out tasks, k trials each, graded by rules; the coach is called only when asked to.

`mappa.eval_score: outcome` (the default) measures the outcome by the recipe's grader and makes no coach call (M-28).
`coach` measures the mean of the actions' scores, from 0 to 10.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from agentrl.grading.interval import eval_block
from agentrl.grading.table_report import table_report
from agentrl.grading.trials import trials_block
from agentrl.protocols import Reward
from agentrl.recipes.collect import Collected, collect, jobs_for, rollout_metrics, total_counts
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.mappa.coaching import Coaching, open_coaching
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.metrics import coach_metrics
from agentrl.recipes.mappa.setup import eval_tasks, make_workflow, open_reward, window
from agentrl.recipes.records import untrained_records
from agentrl.recipes.registry import Progress, VerbOptions
from agentrl.recipes.session import Session, open_run, open_session
from agentrl.run import Run, StepWriter
from agentrl.types import ScoredTrajectory, Task


async def roll_out(
    recipe: MappaRecipe,
    session: Session,
    reward: Reward,
    coaching: Coaching | None,
    tasks: Sequence[Task],
    step: int,
    progress: Progress,
    writer: StepWriter | None = None,
) -> Collected:
    """All trials of the tasks, at the evaluation's temperature, coached only with `mappa.eval_score: coach`."""
    watched = coaching if recipe.mappa.eval_score == "coach" else None
    return await collect(
        session,
        jobs_for(tasks, recipe.mappa.eval_trials, "eval", step),
        make_workflow(recipe, session, recipe.run.eval_temperature, watched.watch if watched else None),
        reward,
        max_concurrent=recipe.rollout.max_concurrent,
        writer=writer,
        progress=progress,
        label="evaluation",
        score_actions=watched.scores if watched else None,
    )


def trial_scores(recipe: MappaRecipe, scored: Sequence[ScoredTrajectory]) -> dict[str, list[float | None]]:
    """Task -> the score of each of its trials, None where it is missing."""
    found: dict[str, list[float | None]] = {}
    for one in scored:
        if recipe.mappa.eval_score == "outcome":
            value = one.outcome.value
        else:
            known = [s.value for s in one.action_scores if s is not None and s.value is not None]
            value = statistics.fmean(known) if known else None
        found.setdefault(one.trajectory.task.id, []).append(value)
    return found


async def evaluate_once(
    recipe: MappaRecipe,
    session: Session,
    reward: Reward,
    coaching: Coaching | None,
    tasks: Sequence[Task],
    run: Run,
    step: int,
    progress: Progress,
) -> dict[str, float | None]:
    """The mean score of each task, by id; None where it is missing. Trajectories go to `evals/step_NNNNNN.jsonl`."""
    collected = await roll_out(recipe, session, reward, coaching, tasks, step, progress)
    lines = [json.dumps(record, ensure_ascii=False) for record in untrained_records(collected.scored)]
    run.write_file(f"evals/step_{step:06d}.jsonl", "".join(line + "\n" for line in lines))
    items: dict[str, float | None] = trials_block(trial_scores(recipe, collected.scored))["items"]
    return items


def evaluate(recipe: MappaRecipe, options: VerbOptions) -> dict[str, Any]:
    """Evaluate the recipe's models or checkpoint: score with its standard error and interval, tokens and times."""
    with (
        open_run(recipe, "eval") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_evaluate(recipe, options, run))


async def _evaluate(recipe: MappaRecipe, options: VerbOptions, run: Run) -> dict[str, Any]:
    tasks = eval_tasks(recipe)
    async with (
        open_reward(recipe) as reward,
        open_coaching(recipe) if recipe.mappa.eval_score == "coach" else nullcontext() as coaching,
        open_session(recipe, seed=recipe.run.seed, window=window(recipe)) as session,
    ):
        writer = run.open_step(0)
        collected = await roll_out(recipe, session, reward, coaching, tasks, 0, options.progress, writer)
        writer.commit(untrained_records(collected.scored, save_prompt_ids=recipe.run.save_prompt_ids))
    result = {
        "method": "mappa",
        "engine": recipe.engine.kind,
        "measured": recipe.mappa.eval_score,
        "eval": evaluation(trial_scores(recipe, collected.scored)),
        "rollouts": rollout_metrics(collected) | coach_metrics(recipe, collected.scored),
        "counts": dict(sorted(total_counts(collected.scored).items())),
    }
    if recipe.reward == "table":
        result["table"] = table_report([one.outcome for one in collected.scored])
    run.write_summary(result)
    return {"run": str(run.path), **result}


def evaluation(scores: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """An evaluation as a summary holds it, with the standard error and the number of trials."""
    trials = trials_block(scores)
    return eval_block(trials["items"]) | {"se": trials["se"], "trials": trials["trials"]}
