"""`agentrl mars train`: roll out, credit per question and role, update once, sync, save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError
from agentrl.recipes.collect import Collected, refuse_ungraded, rollout_metrics
from agentrl.recipes.interrupt import Interrupt
from agentrl.recipes.loop import (
    Training,
    evaluates,
    mean,
    rollouts,
    run_steps,
    sync_all,
    with_recorded_steps,
)
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.credit import Credit, assign
from agentrl.recipes.mars.evaluate import evaluate_once
from agentrl.recipes.mars.metrics import mars_metrics, untrained_reason
from agentrl.recipes.mars.reward import open_reward
from agentrl.recipes.mars.setup import eval_tasks, make_workflow, samples_of, train_tasks, window
from agentrl.recipes.ranks import open_policies
from agentrl.recipes.recorded import Recorded
from agentrl.recipes.records import step_records
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import open_session, open_training
from agentrl.run import Run
from agentrl.types import CreditedSample
from agentrl.update.step import UpdateResult, update_policy


def train(recipe: MarsRecipe, options: VerbOptions) -> dict[str, Any]:
    """Train by MARS and return the summary. Raises `KeyboardInterrupt` after an interrupted run was saved,
    and `ConfigError` where nothing is trained.

    `--from-rollouts` takes each step's trajectories from a recorded run, up to its last step or `run.steps`.
    """
    if not recipe.trained_roles:
        raise ConfigError(
            "nothing is trained: every role's policy is frozen, or left out by mars.train",
            "set the mode of a trained role's policy to full, or change mars.train",
        )
    recorded = None if options.from_rollouts is None else Recorded.open(options.from_rollouts)
    recipe = with_recorded_steps(recipe, recorded)
    with open_training(recipe, options) as (run, interrupt):
        return asyncio.run(_train(recipe, options, run, interrupt, recorded))


async def _train(
    recipe: MarsRecipe, options: VerbOptions, run: Run, interrupt: Interrupt, recorded: Recorded | None
) -> dict[str, Any]:
    tasks, held_out = train_tasks(recipe), eval_tasks(recipe) if recipe.data.eval.path else []
    async with (
        open_reward(recipe, options.progress.note) as reward,
        open_session(recipe, seed=recipe.run.seed, window=window(recipe), trains=True) as session,
    ):
        total_steps = dict.fromkeys(recipe.policy_models, recipe.run.steps)
        asks = recipe.algorithm.kl_coef > 0
        with open_policies(recipe, session, references=asks, total_steps=total_steps) as (policies, references, ranks):
            t = Training(recipe, options, run, session, policies, references, reward, tasks, held_out, recorded, ranks)
            return await run_steps(t, train_step, _evaluate, interrupt)


async def train_step(t: Training, step: int) -> None:
    """One step of MARS (section 6.5): the questions, their rollouts, credit, one update, sync, records."""
    started = time.monotonic()
    recipe = t.recipe
    collected = await rollouts(t, step, make_workflow(recipe, t.session))
    samples = [s for one in collected.scored for s in samples_of(recipe, one)]
    credit = assign(samples, recipe.mars, seed=recipe.run.seed, step=step)
    updating = time.monotonic()
    results = update_policies(t, credit, step)
    syncing = time.monotonic()
    await sync_all(t)
    done = time.monotonic()
    times = {"time/update": syncing - updating, "time/sync": done - syncing, "time/total": done - started}
    if evaluates(recipe.run, step):
        await _evaluate(t, step)
    _record(t, step, collected, credit, results, times)


def update_policies(t: Training, credit: Credit, step: int) -> dict[str, UpdateResult]:
    """One optimiser step of each policy on its own samples, both roles in the same step."""
    every = t.recipe.optim.part_stats_every
    results = {}
    for name, policy in t.policies.items():
        mine = [c for c in credit.credited if c.sample.policy == name]
        results[name] = update_policy(
            policy,
            mine,
            t.recipe.algorithm,
            reference=t.references.get(name),
            part_stats=bool(every) and step % every == 0,
            ranks=t.ranks,
        )
    return results


def _record(
    t: Training,
    step: int,
    collected: Collected,
    credit: Credit,
    results: Mapping[str, UpdateResult],
    times: Mapping[str, float],
) -> None:
    """Trajectories first, then the step's metrics: what a resumed run keeps is complete.

    Raises `RunFailedError` where the reward graded nothing.
    """
    credited: list[CreditedSample] = []
    old: list[Mapping[int, float]] = []
    for name in t.recipe.policy_models:
        mine = [c for c in credit.credited if c.sample.policy == name]
        credited += mine
        old += results[name].old if name in results else [{}] * len(mine)
    records = step_records(collected.scored, credited, old, save_prompt_ids=t.recipe.run.save_prompt_ids)
    t.run.open_step(step, keep_part=True).commit(records)
    metrics: dict[str, Any] = {"step": step, "policy_version": max(t.served.values())}
    metrics |= rollout_metrics(collected)
    metrics |= mars_metrics(collected.scored, credit, results, t.recipe.algorithm.kl_coef)
    metrics |= times
    if step in t.evals:
        metrics["eval/score"] = mean(t.evals[step])
    t.run.log_metrics(metrics)
    t.options.progress.log(step, metrics)
    nothing = untrained_reason(credit, t.recipe.algorithm.kl_coef)
    if nothing is not None:
        t.options.progress.note(f"step {step} trained nothing: {nothing}")
    missing = metrics["reward/missing"] / max(1, len(collected.scored))
    if missing > 0.2:
        t.options.progress.note(f"step {step}: {missing:.0%} of the rewards are missing; see the trajectories' reasons")
    refuse_ungraded(step, "reward", collected.scored)


async def _evaluate(t: Training, step: int) -> None:
    if t.held_out:
        t.evals[step] = await evaluate_once(t.recipe, t.session, t.reward, t.held_out, t.run, step, t.options.progress)
