"""`agentrl mappa train`: roll out and coach, log-probabilities, credit, several updates with the old fixed, sync."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
from agentrl.recipes.mappa.coaching import Coaching, open_coaching
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.credit import Credit, assign, token_weights
from agentrl.recipes.mappa.evaluate import evaluate_once
from agentrl.recipes.mappa.metrics import mappa_metrics, untrained_reason
from agentrl.recipes.mappa.setup import (
    eval_tasks,
    make_workflow,
    open_reward,
    refuse_leak,
    samples_of,
    train_tasks,
    window,
)
from agentrl.recipes.ranks import open_policies
from agentrl.recipes.recorded import Recorded
from agentrl.recipes.records import step_records
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import open_session, open_training
from agentrl.run import Run
from agentrl.types import CreditedSample, Sample, ScoredSample
from agentrl.update.step import UpdateResult, update_policy


def train(recipe: MappaRecipe, options: VerbOptions) -> dict[str, Any]:
    """Train by MAPPA and return the summary. Raises `KeyboardInterrupt` after an interrupted run was saved.

    `--from-rollouts` takes each step's trajectories and scores from a recorded run; the coach then scores none.
    """
    recorded = None if options.from_rollouts is None else Recorded.open(options.from_rollouts)
    recipe = with_recorded_steps(recipe, recorded)
    with open_training(recipe, options) as (run, interrupt):
        return asyncio.run(_train(recipe, options, run, interrupt, recorded))


async def _train(
    recipe: MappaRecipe, options: VerbOptions, run: Run, interrupt: Interrupt, recorded: Recorded | None
) -> dict[str, Any]:
    tasks, held_out = train_tasks(recipe), eval_tasks(recipe) if recipe.data.eval.path else []
    refuse_leak(tasks, held_out)
    async with (
        open_reward(recipe) as reward,
        open_coaching(recipe) as coaching,
        open_session(recipe, seed=recipe.run.seed, window=window(recipe), trains=True) as session,
    ):
        asks, total_steps = recipe.needs_reference, optimiser_steps(recipe)
        with open_policies(recipe, session, references=asks, total_steps=total_steps) as (policies, references, ranks):
            t = Training(recipe, options, run, session, policies, references, reward, tasks, held_out, recorded, ranks)
            return await run_steps(t, partial(train_step, coaching), partial(_evaluate, coaching), interrupt)


async def train_step(coaching: Coaching, t: Training, step: int) -> None:
    """One step of MAPPA (section 3): the team's rollouts, each action's score, samples, old and reference
    log-probabilities, credit, several updates of each policy with the old ones fixed, sync, records."""
    started = time.monotonic()
    recipe = t.recipe
    workflow = make_workflow(recipe, t.session, watch=coaching.watch)
    collected = await rollouts(t, step, workflow, coaching.scores)
    made = samples_of(recipe, collected.scored)
    updating = time.monotonic()
    scored = score_samples(t, made.samples)
    credit = assign(scored, made.rewards, recipe.mappa, groups=recipe.normalisation_groups())
    results = update_policies(t, credit, step)
    syncing = time.monotonic()
    await sync_all(t)
    done = time.monotonic()
    times = {"time/update": syncing - updating, "time/sync": done - syncing, "time/total": done - started}
    if evaluates(recipe.run, step):
        await _evaluate(coaching, t, step)
    _record(t, step, collected, credit, results, times)


def score_samples(t: Training, samples: Sequence[Sample]) -> list[ScoredSample]:
    """The samples with the trainer's log-probabilities before the update, and the reference's where there is one.

    Both score the same rows, so that they are equal to the last bit while their weights are (M-09).
    """
    old: dict[str, tuple[float, ...]] = {}
    reference: dict[str, tuple[float, ...]] = {}
    for name, policy in t.policies.items():
        mine = [s for s in samples if s.policy == name and s.num_trained]
        for found, scorer in ((old, policy.scorer), (reference, t.references.get(name))):
            if scorer is not None and mine:
                scores = t.ranks.score(name, scorer, mine, reference=found is reference)
                for sample, values in zip(mine, scores, strict=True):
                    found[sample.id] = tuple(values.get(i, math.nan) for i in range(len(sample.ids)))
    blank = {s.id: (math.nan,) * len(s.ids) for s in samples}
    known = blank if t.references else {}
    return [ScoredSample(s, old.get(s.id, blank[s.id]), reference.get(s.id, known.get(s.id))) for s in samples]


def update_policies(t: Training, credit: Credit, step: int) -> dict[str, list[UpdateResult]]:
    """One optimiser step per mini-batch of each policy, on its own samples. A policy whose agents have no trained
    token takes none, and its weights keep their bits (M-18)."""
    results: dict[str, list[UpdateResult]] = {}
    recipe, every = t.recipe, t.recipe.optim.part_stats_every
    per_agent = bool(every) and step % every == 0
    for name, policy in t.policies.items():
        mine = [c for c in credit.credited if c.sample.policy == name and c.sample.num_trained]
        results[name] = [
            update_policy(policy, batch, recipe.algorithm, part_stats=per_agent, ranks=t.ranks)
            for batch in mini_batches(mine, recipe, f"{recipe.run.seed}-{step}-{name}")
        ]
    return results


def mini_batches(credited: Sequence[CreditedSample], recipe: MappaRecipe, seed: str) -> list[list[CreditedSample]]:
    """Even parts of at most `optim.mini_batch` samples in an order drawn from `seed`; none is left out (M-25).

    Each is an optimiser step, so its weights are means over it alone. Of no samples there is one part, an empty one: it
    takes no step, and the policy's metrics are there all the same.
    """
    size = recipe.optim.mini_batch or max(1, len(credited))
    order = list(range(len(credited)))
    num_parts = max(1, math.ceil(len(order) / size))
    if num_parts > 1:
        random.Random(seed).shuffle(order)
    parts = [[credited[i] for i in sorted(order[k::num_parts])] for k in range(num_parts)]
    return [_reweighted(part, recipe) if part else [] for part in parts]


def _reweighted(part: Sequence[CreditedSample], recipe: MappaRecipe) -> list[CreditedSample]:
    weights = token_weights([one.sample for one in part], recipe.mappa)
    return [replace(one, weights=tuple(w.tolist())) for one, w in zip(part, weights, strict=True)]


def optimiser_steps(recipe: MappaRecipe) -> dict[str, int]:
    """Policy -> the optimiser steps of a whole run, for the learning rate's schedule, with every agent acting once in
    each trajectory; loops may make more, at the last rate."""
    rollouts_per_step = recipe.rollout.questions_per_step * recipe.rollout.group_size
    visits = {name: sum(a.policy == name for a in recipe.agents.values()) for name in recipe.policy_models}
    size = recipe.optim.mini_batch
    return {
        name: recipe.run.steps * (1 if size is None else max(1, math.ceil(rollouts_per_step * num / size)))
        for name, num in visits.items()
    }


def _record(
    t: Training,
    step: int,
    collected: Collected,
    credit: Credit,
    results: Mapping[str, Sequence[UpdateResult]],
    times: Mapping[str, float],
) -> None:
    """Trajectories first, then the step's metrics: what a resumed run keeps is complete."""
    old = [
        {i: v for i, v in enumerate(one.scored.old or ()) if one.sample.reasons[i] is None} for one in credit.credited
    ]
    records = step_records(collected.scored, credit.credited, old, save_prompt_ids=t.recipe.run.save_prompt_ids)
    t.run.open_step(step, keep_part=True).commit(records)
    version = {n: p.version for n, p in t.policies.items() if p.trainable}
    metrics: dict[str, Any] = {"step": step, "policy_version": max(version.values(), default=0)}
    metrics |= rollout_metrics(collected)
    metrics |= mappa_metrics(t.recipe, collected.scored, credit, results)
    metrics |= times
    if step in t.evals:
        metrics["eval/score"] = mean(t.evals[step])
    t.run.log_metrics(metrics)
    t.options.progress.log(step, metrics)
    nothing = untrained_reason(credit)
    if nothing is not None:
        t.options.progress.note(f"step {step} trained nothing: {nothing}")
    actions = sum(len(one.action_scores) for one in collected.scored)
    missing = metrics["reward/missing"] / max(1, actions)
    if missing > 0.2:
        t.options.progress.note(f"step {step}: {missing:.0%} of the scores are missing; see the actions' reasons")
    mappa = t.recipe.mappa
    if t.recipe.reward is not None and (mappa.credit != "process" or mappa.outcome_weight > 0):
        refuse_ungraded(step, "reward", collected.scored)
    if mappa.credit == "process":
        refuse_ungraded(step, "coach", collected.scored, actions=True)


async def _evaluate(coaching: Coaching, t: Training, step: int) -> None:
    if t.held_out:
        t.evals[step] = await evaluate_once(
            t.recipe, t.session, t.reward, coaching, t.held_out, t.run, step, t.options.progress
        )
