"""What every training run with an engine does around its steps: restore, evaluate, save, summarise, stop when asked.

The step itself is the method's own (`agentrl/recipes/<method>/train.py`), where its stages stand in order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from agentrl.config.schema import BaseRecipe, ModelConfig, RunConfig
from agentrl.data import fingerprint, order
from agentrl.errors import ConfigError, DataError
from agentrl.grading.interval import eval_block, paired_rise
from agentrl.launch.devices import Plan
from agentrl.models.lora import Adapter
from agentrl.protocols import Reward
from agentrl.recipes.collect import ActionScores, Collected, collect, jobs_for
from agentrl.recipes.interrupt import Interrupt
from agentrl.recipes.recorded import Recorded
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import Session
from agentrl.records import trajectory_from_record
from agentrl.rollout.runner import Workflow
from agentrl.run import Run
from agentrl.types import ScoredTrajectory, Task
from agentrl.update.backbone import Backbone
from agentrl.update.checkpoint import load_policy, save_policy
from agentrl.update.policy import Policy
from agentrl.update.ranks import Ranks
from agentrl.update.scorer import Scorer
from agentrl.update.weight_sync import sync

log = logging.getLogger(__name__)

Items = Mapping[str, float | None]
"""The score of each held-out task by id; None where it is missing."""


@dataclass(slots=True)
class Training:
    """Everything one training run holds while it runs. `evals` maps a step to its evaluation."""

    recipe: Any
    options: VerbOptions
    run: Run
    session: Session
    policies: Mapping[str, Policy]
    references: Mapping[str, Scorer]
    reward: Reward
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    recorded: Recorded | None = None
    ranks: Ranks = field(default_factory=Ranks)
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)

    @property
    def served(self) -> dict[str, int]:
        """The version of each policy that the engine serves; a frozen one stays at 0."""
        return {n: self.policies[n].version if n in self.policies else 0 for n in self.recipe.policy_models}


Place = tuple[Path, Literal["float32", "bfloat16"]]
"""Where a policy's model lies, and what it computes in."""

Step = Callable[[Training, int], Awaitable[None]]
Evaluate = Callable[[Training, int], Awaitable[None]]


async def run_steps(t: Training, step_body: Step, evaluate: Evaluate, interrupt: Interrupt) -> dict[str, Any]:
    """All steps from the first, or from where a run broke off, and the summary.

    Raises `KeyboardInterrupt` once an interrupted run is saved.
    """
    run: RunConfig = t.recipe.run
    log.info("engine %s and policies %s are up", t.recipe.engine.kind, sorted(t.policies))
    if t.recorded is not None:
        t.options.progress.note(
            f"trains on the rollouts recorded in {t.recorded.folder}: rollout.group_size, rollout.questions_per_step, "
            "data and reward are taken from the recording; evaluations use data.eval and reward of the recipe"
        )
    first = await restore(t)
    finished = _finished(t, first)
    if finished is not None:
        return finished
    t.options.progress.begin(run.steps, first)
    if first == 1 and 0 not in t.evals:
        log.info("evaluation before training on %d tasks", len(t.held_out))
        await evaluate(t, 0)
    for step in range(first, run.steps + 1):
        log.info("step %d begins", step)
        await step_body(t, step)
        last = step == run.steps or interrupt.requested
        if last or (run.save_every and step % run.save_every == 0):
            save(t, step)
        if interrupt.requested and step < run.steps:
            summarise(t, step, "interrupted")
            raise KeyboardInterrupt
    return summarise(t, run.steps, "done")


def _finished(t: Training, first: int) -> dict[str, Any] | None:
    """The summary of a resumed run that has no step left and was summarised after its last one."""
    path = t.run.path / "summary.json"
    if t.run.resume_state is None or first <= t.recipe.run.steps or not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if summary.get("steps") != t.recipe.run.steps:
        return None
    t.options.progress.note(f"the run is at step {first - 1} of {t.recipe.run.steps} already; nothing is left to do")
    return {"run": str(t.run.path), **summary}


def evaluates(run: RunConfig, step: int) -> bool:
    """Whether a step ends with an evaluation: the last one does, and every `run.eval_every`th."""
    return step == run.steps or bool(run.eval_every and step % run.eval_every == 0)


def with_recorded_steps(recipe: Any, recorded: Recorded | None) -> Any:
    """The recipe with no more steps than were recorded."""
    if recorded is None:
        return recipe
    steps = min(recipe.run.steps, len(recorded))
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": steps})})


async def rollouts(t: Training, step: int, workflow: Workflow, score_actions: ActionScores | None = None) -> Collected:
    """The rollouts of each question of a step. Finished ones of a broken step are reused, but for the deterministic
    mode; with `--from-rollouts` the recorded ones are taken."""
    recipe = t.recipe
    if t.recorded is not None:
        decode = {name: format.decode_completion for name, format in t.session.formats.items()}
        return t.recorded.step(step, recipe, t.served, decode)
    data, count = recipe.data, recipe.rollout.questions_per_step
    tasks = order(t.tasks, recipe.run.seed, step, count, shuffle=data.shuffle, stratify=data.stratify)
    reuse = t.run.resumed and not recipe.engine.deterministic
    parts = [trajectory_from_record(r) for r in t.run.read_part(step)] if reuse else []
    versions = set(t.served.items())
    done = {p.trajectory.id: p for p in parts if _versions(p) <= versions}
    writer = t.run.open_step(step, keep_part=bool(done))
    return await collect(
        t.session,
        jobs_for(tasks, recipe.rollout.group_size, "train", step),
        workflow,
        t.reward,
        max_concurrent=recipe.rollout.max_concurrent,
        writer=writer,
        done=done,
        progress=t.options.progress,
        score_actions=score_actions,
    )


def _versions(scored: ScoredTrajectory) -> set[tuple[str, int]]:
    actions = [turn.action for turn in scored.trajectory.turns]
    return {(action.request.policy, action.completion.policy_version) for action in actions}


@dataclass(frozen=True, slots=True)
class Ground:
    """What the policies of one trainer rank are made from. `folders` and `adapters` are the session's. A `follower`
    rank makes replicas that never step."""

    folders: Mapping[str, Path]
    adapters: Mapping[str, Adapter]
    device: str
    follower: bool = False

    @classmethod
    def of(cls, session: Session) -> Ground:
        return cls(session.folders, session.adapters, session.plan.device)


def make_policies(
    recipe: BaseRecipe, ground: Ground, *, references: bool, total_steps: Mapping[str, int]
) -> tuple[dict[str, Policy], dict[str, Scorer]]:
    """Every trained policy, and with `references` its frozen reference: where it began.

    Frozen policies live in the engine alone. Policies that begin with the same weights share one reference, LoRA
    policies of one model its weights: the reference of one that began without an adapter is that bare model.
    `total_steps` are a policy's optimiser steps.
    """
    backbones = _backbones(recipe, ground)
    policies: dict[str, Policy] = {}
    shared: dict[tuple[Any, ...], Scorer] = {}
    found: dict[str, Scorer] = {}
    for name, model in recipe.policy_models.items():
        if model.mode == "frozen":
            continue

        place = (ground.folders[name], model.dtype)
        start = ground.adapters[name].start if name in ground.adapters else None

        def make(config: ModelConfig, name: str = name, place: Place = place, start: Path | None = start) -> Policy:
            return Policy(
                name,
                ground.folders[name],
                config,
                recipe.optim,
                total_steps=total_steps[name],
                train_under_grammar=recipe.algorithm.constrained == "allowed",
                device=ground.device,
                follower=ground.follower,
                backbone=None if config.mode == "full" else backbones.get(place),
                start=start,
                seed=int.from_bytes(sha256(f"{recipe.run.seed} {name}".encode()).digest()[:7]),
            )

        policies[name] = make(model)
        if references:
            key = (*place, start)
            if key not in shared:
                shared[key] = make(model.model_copy(update={"mode": "frozen", "lora": None})).scorer
            found[name] = shared[key]
    return policies, found


def _backbones(recipe: BaseRecipe, ground: Ground) -> dict[Place, Backbone]:
    """The models of LoRA policies, each once."""
    places = {(ground.folders[n], m.dtype) for n, m in recipe.policy_models.items() if m.mode == "lora"}
    return {p: Backbone(*p, recipe.optim, device=ground.device) for p in sorted(places)}


async def sync_all(t: Training) -> None:
    """Give the engine the weights of every trained policy."""
    for policy in t.policies.values():
        await sync(policy, t.session.engine)


def mean(items: Items) -> float | None:
    """The mean of the scores that are there."""
    known = [v for v in items.values() if v is not None]
    return sum(known) / len(known) if known else None


async def restore(t: Training) -> int:
    """Go on after the newest checkpoint; returns the first step to run."""
    state = t.run.resume_state
    if state is None:
        if t.run.set_aside is not None:
            t.options.progress.note(
                f"no whole checkpoint is left in {t.run.path / 'checkpoints'}: training starts again at step 1; "
                f"the metrics and trajectories of before lie in {t.run.set_aside}"
            )
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
        load_policy(policy, state.folder / "policies" / name)
        t.ranks.spread(policy)
    await sync_all(t)
    t.evals = {int(k): dict(v) for k, v in state.state["evals"].items()}
    t.options.progress.note(f"resumed after step {state.step}: weights, optimiser, data order and evaluations")
    return state.step + 1


def save(t: Training, step: int) -> None:
    """A checkpoint of every trained policy."""
    evals = {str(k): v for k, v in t.evals.items()}
    score = mean(t.evals[step]) if step in t.evals else None
    state = {"evals": evals, "data": fingerprint(t.tasks), "rollouts": _rollouts_of(t)}
    with t.run.checkpoint(step, state=state, score=score) as folder:
        for name, policy in t.policies.items():
            save_policy(policy, folder / "policies" / name)


def _rollouts_of(t: Training) -> str | None:
    return None if t.recorded is None else str(t.recorded.folder)


def summarise(t: Training, step: int, status: str) -> dict[str, Any]:
    """Write `summary.json` and return it with the run's folder."""
    result: dict[str, Any] = {
        "method": t.recipe.method,
        "status": status,
        "steps": step,
        "policy_version": t.served,
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
    return {"kind": plan.device, "gpus": len(plan.gpus), "threads": plan.threads, "ranks": plan.ranks}
