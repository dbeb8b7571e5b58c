"""`agentrl mars train`: roll out, credit per question and role, update once, sync, save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.load import dump_yaml
from agentrl.data import fingerprint, order
from agentrl.errors import ConfigError, DataError
from agentrl.grading.interval import paired_rise
from agentrl.launch.devices import Plan
from agentrl.protocols import Reward
from agentrl.recipes.collect import Collected, collect, jobs_for, rollout_metrics
from agentrl.recipes.interrupt import Interrupt, interruptible
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.credit import Credit, assign
from agentrl.recipes.mars.evaluate import evaluate_once
from agentrl.recipes.mars.metrics import mars_metrics, untrained_reason
from agentrl.recipes.mars.reward import open_reward
from agentrl.recipes.mars.setup import eval_tasks, make_workflow, samples_of, train_tasks, window
from agentrl.recipes.recorded import Recorded
from agentrl.recipes.records import step_records
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import Session, open_session
from agentrl.records import trajectory_from_record
from agentrl.run import Run
from agentrl.types import ScoredTrajectory, Task
from agentrl.update.checkpoint import load_policy, save_policy
from agentrl.update.policy import Policy
from agentrl.update.scorer import Scorer
from agentrl.update.step import UpdateResult, update_policy
from agentrl.update.weight_sync import sync


@dataclass(slots=True)
class Training:
    """Everything one training run holds while it runs."""

    recipe: MarsRecipe
    options: VerbOptions
    run: Run
    session: Session
    policies: Mapping[str, Policy]
    references: Mapping[str, Scorer]
    reward: Reward
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    recorded: Recorded | None = None
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)
    best: float | None = None


def train(recipe: MarsRecipe, options: VerbOptions) -> dict[str, Any]:
    """Train by MARS and return the summary. Raises `KeyboardInterrupt` after an interrupted run was saved.

    `--from-rollouts` takes each step's trajectories from a recorded run, up to its last step or `run.steps`.
    """
    recorded = None if options.from_rollouts is None else Recorded.open(options.from_rollouts)
    if recorded is not None:
        steps = min(recipe.run.steps, len(recorded))
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": steps})})
    with (
        Run.create(
            recipe.run.dir,
            recipe.run.name,
            dump_yaml(recipe),
            options.resume,
            recipe.run.seed,
            stem="mars",
            keep_last=recipe.run.keep_last,
            keep_best=recipe.run.keep_best,
        ) as run,
        interruptible(options.progress.note, finish_step=True) as interrupt,
    ):
        return asyncio.run(_train(recipe, options, run, interrupt, recorded))


async def _train(
    recipe: MarsRecipe, options: VerbOptions, run: Run, interrupt: Interrupt, recorded: Recorded | None
) -> dict[str, Any]:
    tasks, held_out = train_tasks(recipe), eval_tasks(recipe) if recipe.data.eval.path else []
    async with (
        open_reward(recipe, options.progress.note) as reward,
        open_session(recipe, seed=recipe.run.seed, window=window(recipe)) as session,
    ):
        policies, references = make_policies(recipe, session)
        t = Training(recipe, options, run, session, policies, references, reward, tasks, held_out, recorded)
        first = await _restore(t)
        options.progress.begin(recipe.run.steps, first)
        if first == 1 and 0 not in t.evals:
            await _evaluate(t, 0)
        for step in range(first, recipe.run.steps + 1):
            await train_step(t, step)
            last = step == recipe.run.steps or interrupt.requested
            if last or (recipe.run.save_every and step % recipe.run.save_every == 0):
                _save(t, step)
            if interrupt.requested and step < recipe.run.steps:
                _summarise(t, step, "interrupted")
                raise KeyboardInterrupt
        return _summarise(t, recipe.run.steps, "done")


async def train_step(t: Training, step: int) -> None:
    """One step of MARS (section 6.5): the questions, their rollouts, credit, one update, sync, records."""
    started = time.monotonic()
    recipe = t.recipe
    collected = await _rollouts(t, step)
    samples = [s for one in collected.scored for s in samples_of(recipe, one)]
    credit = assign(samples, recipe.mars, seed=recipe.run.seed, step=step)
    updating = time.monotonic()
    results = update_policies(t.policies, t.references, credit, recipe, step)
    syncing = time.monotonic()
    for policy in t.policies.values():
        if policy.trainable:
            await sync(policy, t.session.engine)
    done = time.monotonic()
    times = {"time/update": syncing - updating, "time/sync": done - syncing, "time/total": done - started}
    if step == recipe.run.steps or (recipe.run.eval_every and step % recipe.run.eval_every == 0):
        await _evaluate(t, step)
    _record(t, step, collected, credit, results, times)


async def _rollouts(t: Training, step: int) -> Collected:
    """G rollouts of each question. Finished ones of a broken step are reused, but for the deterministic mode; with
    `--from-rollouts` the recorded ones are taken."""
    recipe = t.recipe
    if t.recorded is not None:
        decode = {name: format.decode_completion for name, format in t.session.formats.items()}
        return t.recorded.step(step, recipe, {n: p.version for n, p in t.policies.items()}, decode)
    tasks = order(t.tasks, recipe.run.seed, step, recipe.rollout.questions_per_step, shuffle=recipe.data.shuffle)
    reuse = t.run.resumed and not recipe.engine.deterministic
    parts = [trajectory_from_record(r) for r in t.run.read_part(step)] if reuse else []
    versions = {p.version for p in t.policies.values()}
    done = {p.trajectory.id: p for p in parts if _versions(p) <= versions}
    writer = t.run.open_step(step, keep_part=bool(done))
    return await collect(
        t.session,
        jobs_for(tasks, recipe.rollout.group_size, "train", step),
        make_workflow(recipe, t.session),
        t.reward,
        max_concurrent=recipe.rollout.max_concurrent,
        writer=writer,
        done=done,
        progress=t.options.progress,
    )


def _versions(scored: ScoredTrajectory) -> set[int]:
    return {turn.action.completion.policy_version for turn in scored.trajectory.turns}


def make_policies(recipe: MarsRecipe, session: Session) -> tuple[dict[str, Policy], dict[str, Scorer]]:
    """Every policy, and the frozen reference of each trained one where `algorithm.kl_coef` asks for it."""
    policies, references = {}, {}
    for name, model in recipe.policy_models.items():

        def make(config: Any, name: str = name) -> Policy:
            return Policy(
                name,
                session.folders[name],
                config,
                recipe.optim,
                total_steps=recipe.run.steps,
                train_under_grammar=recipe.algorithm.constrained == "allowed",
                device=session.plan.device,
            )

        policies[name] = make(model)
        if recipe.algorithm.kl_coef > 0 and model.mode != "frozen":
            references[name] = make(model.model_copy(update={"mode": "frozen"})).scorer
    return policies, references


def update_policies(
    policies: Mapping[str, Policy], references: Mapping[str, Scorer], credit: Credit, recipe: MarsRecipe, step: int
) -> dict[str, UpdateResult]:
    """One optimiser step of each policy on its own samples, both roles in the same step."""
    every = recipe.optim.part_stats_every
    results = {}
    for name, policy in policies.items():
        mine = [c for c in credit.credited if c.sample.policy == name]
        results[name] = update_policy(
            policy,
            mine,
            recipe.algorithm,
            reference=references.get(name),
            part_stats=bool(every) and step % every == 0,
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
    """Trajectories first, then the step's metrics: what a resumed run keeps is complete."""
    credited, old = [], []
    for name, result in results.items():
        credited += [c for c in credit.credited if c.sample.policy == name]
        old += result.old
    records = step_records(collected.scored, credited, old, save_prompt_ids=t.recipe.run.save_prompt_ids)
    t.run.open_step(step, keep_part=True).commit(records)
    version = {n: p.version for n, p in t.policies.items() if p.trainable}
    metrics: dict[str, Any] = {"step": step, "policy_version": max(version.values(), default=0)}
    metrics |= rollout_metrics(collected)
    metrics |= mars_metrics(collected.scored, credit, results)
    metrics |= times
    if step in t.evals:
        metrics["eval/score"] = _mean(t.evals[step])
    t.run.log_metrics(metrics)
    t.options.progress.log(step, metrics)
    nothing = untrained_reason(credit, t.recipe.algorithm.kl_coef)
    if nothing is not None:
        t.options.progress.note(f"step {step} trained nothing: {nothing}")
    missing = metrics["reward/missing"] / max(1, len(collected.scored))
    if missing > 0.2:
        t.options.progress.note(f"step {step}: {missing:.0%} of the rewards are missing; see the trajectories' reasons")


async def _evaluate(t: Training, step: int) -> None:
    if t.held_out:
        t.evals[step] = await evaluate_once(t.recipe, t.session, t.reward, t.held_out, t.run, step, t.options.progress)


def _mean(items: Mapping[str, float | None]) -> float | None:
    known = [v for v in items.values() if v is not None]
    return sum(known) / len(known) if known else None


async def _restore(t: Training) -> int:
    """Go on after the newest checkpoint; returns the first step to run."""
    state = t.run.resume_state
    if state is None:
        return 1
    if state.state["data"] != fingerprint(t.tasks):
        raise DataError(
            "data.path: the training data changed since this run was saved", "resume with the data it began with"
        )
    if state.state.get("rollouts") != _rollouts_of(t):
        raise ConfigError(
            f"--from-rollouts: this run was trained on {state.state.get('rollouts') or 'fresh rollouts'}",
            "resume it with the same --from-rollouts, or without it as it began",
        )
    for name, policy in t.policies.items():
        if policy.trainable:
            load_policy(policy, state.folder / "policies" / name)
            await sync(policy, t.session.engine)
    t.evals = {int(k): dict(v) for k, v in state.state["evals"].items()}
    t.options.progress.note(f"resumed after step {state.step}: weights, optimiser, data order and evaluations")
    return state.step + 1


def _save(t: Training, step: int) -> None:
    evals = {str(k): v for k, v in t.evals.items()}
    score = _mean(t.evals[step]) if step in t.evals else None
    state = {"evals": evals, "data": fingerprint(t.tasks), "rollouts": _rollouts_of(t)}
    with t.run.checkpoint(step, state=state, score=score) as folder:
        for name, policy in t.policies.items():
            if policy.trainable:
                save_policy(policy, folder / "policies" / name)


def _rollouts_of(t: Training) -> str | None:
    return None if t.recorded is None else str(t.recorded.folder)


def _summarise(t: Training, step: int, status: str) -> dict[str, Any]:
    from agentrl.grading.interval import eval_block

    result: dict[str, Any] = {
        "method": "mars",
        "status": status,
        "steps": step,
        "policy_version": {n: p.version for n, p in t.policies.items()},
        "layout": {n: p.layout for n, p in t.policies.items()},
        "device": _device(t.session.plan),
        "engine": t.recipe.engine.kind,
    }
    if 0 in t.evals:
        result["eval_before"] = eval_block(t.evals[0])
    if step in t.evals and step > 0:
        result["eval_after"] = eval_block(t.evals[step])
        if 0 in t.evals:
            result["rise"] = paired_rise(t.evals[0], t.evals[step])
    t.run.write_summary(result)
    return {"run": str(t.run.path), **result}


def _device(plan: Plan) -> dict[str, Any]:
    return {"kind": plan.device, "gpus": len(plan.gpus), "threads": plan.threads}
