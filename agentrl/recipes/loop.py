"""What every training run does around its steps: restore, evaluate, save, summarise, stop when asked.

The loop is one for all methods; the step itself is the method's own (`agentrl/recipes/<method>/train.py`), where its
stages stand in order. `Running` is what the loop asks of a run, `Training` a run with an engine and policies.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

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
from agentrl.run import ResumeState, Run
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


class Running(Protocol):
    """A training run under way, as its loop sees it. `evals` maps a step to its evaluation."""

    recipe: Any
    options: VerbOptions
    run: Run
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    evals: dict[int, dict[str, float | None]]

    async def restore(self) -> int:
        """Make ready for the first step to run, which is returned: 1, or the one after the newest checkpoint."""
        ...

    def save(self, step: int) -> None:
        """A checkpoint of everything that a resumed run goes on from."""
        ...

    def summarise(self, step: int, status: str) -> dict[str, Any]:
        """Write `summary.json` and return it with the run's folder."""
        ...


R = TypeVar("R", bound=Running)


async def run_steps(
    t: R,
    step_body: Callable[[R, int], Awaitable[None]],
    evaluate: Callable[[R, int], Awaitable[None]],
    interrupt: Interrupt,
) -> dict[str, Any]:
    """All steps from the first, or from where a run broke off, and the summary.

    Raises `KeyboardInterrupt` once an interrupted run is saved.
    """
    run: RunConfig = t.recipe.run
    first = await t.restore()
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
            t.save(step)
        if interrupt.requested and step < run.steps:
            t.summarise(step, "interrupted")
            raise KeyboardInterrupt
    return t.summarise(run.steps, "done")


def _finished(t: Running, first: int) -> dict[str, Any] | None:
    """The summary of a resumed run that has no step left and was summarised after its last one."""
    path = t.run.path / "summary.json"
    if t.run.resume_state is None or first <= t.recipe.run.steps or not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if summary.get("steps") != t.recipe.run.steps:
        return None
    t.options.progress.note(f"the run is at step {first - 1} of {t.recipe.run.steps} already; nothing is left to do")
    return {"run": str(t.run.path), **summary}


def newest_checkpoint(t: Running) -> ResumeState | None:
    """What to go on from, its evaluations taken over; None where training begins at step 1.

    Raises `DataError` where the checkpoint was trained on other data.
    """
    found = t.run.resume_state
    if found is None:
        if t.run.set_aside is not None:
            t.options.progress.note(
                f"no whole checkpoint is left in {t.run.path / 'checkpoints'}: training starts again at step 1; "
                f"what was recorded before lies in {t.run.set_aside}"
            )
        return None
    if found.state["data"] != fingerprint(t.tasks):
        raise DataError(
            "data.path: the training data changed since this run was saved", "resume with the data it began with"
        )
    t.evals = {int(k): dict(v) for k, v in found.state["evals"].items()}
    return found


def checkpoint(t: Running, step: int, state: Mapping[str, Any]) -> AbstractContextManager[Path]:
    """A new checkpoint's folder to fill; `state` is kept beside what `newest_checkpoint` reads."""
    evals = {str(k): v for k, v in t.evals.items()}
    score = mean(t.evals[step]) if step in t.evals else None
    return t.run.checkpoint(step, state={"evals": evals, "data": fingerprint(t.tasks), **state}, score=score)


def evaluated(t: Running, step: int) -> dict[str, Any]:
    """What the summary after a step says of the held-out tasks: before training, now, and the rise."""
    found: dict[str, Any] = {}
    if 0 in t.evals:
        found["eval_before"] = eval_block(t.evals[0])
    if step in t.evals and step > 0:
        found["eval_after"] = eval_block(t.evals[step])
        if 0 in t.evals:
            found["rise"] = paired_rise(t.evals[0], t.evals[step])
    return found


def evaluates(run: RunConfig, step: int) -> bool:
    """Whether a step ends with an evaluation: the last one does, and every `run.eval_every`th."""
    return step == run.steps or bool(run.eval_every and step % run.eval_every == 0)


def mean(items: Items) -> float | None:
    """The mean of the scores that are there."""
    known = [v for v in items.values() if v is not None]
    return sum(known) / len(known) if known else None


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

    async def restore(self) -> int:
        """Raises `DataError` for other training data than the checkpoint's, `ConfigError` for other rollouts."""
        log.info("engine %s and policies %s are up", self.recipe.engine.kind, sorted(self.policies))
        if self.recorded is not None:
            self.options.progress.note(
                f"trains on the rollouts recorded in {self.recorded.folder}: rollout.group_size, "
                "rollout.questions_per_step, data and reward are taken from the recording; evaluations use data.eval "
                "and reward of the recipe"
            )
        found = newest_checkpoint(self)
        if found is None:
            return 1
        if found.state.get("rollouts") != self._rollouts:
            raise ConfigError(
                f"--from-rollouts: this run was trained on {found.state.get('rollouts') or 'fresh rollouts'}",
                "resume it with the same --from-rollouts, or without it as it began",
            )
        for name, policy in self.policies.items():
            load_policy(policy, found.folder / "policies" / name)
            self.ranks.spread(policy)
        await sync_all(self)
        self.options.progress.note(f"resumed after step {found.step}: weights, optimiser, data order and evaluations")
        return found.step + 1

    def save(self, step: int) -> None:
        """A checkpoint of every trained policy."""
        with checkpoint(self, step, {"rollouts": self._rollouts}) as folder:
            for name, policy in self.policies.items():
                save_policy(policy, folder / "policies" / name)

    def summarise(self, step: int, status: str) -> dict[str, Any]:
        """Write `summary.json` and return it with the run's folder."""
        result: dict[str, Any] = {
            "method": self.recipe.method,
            "status": status,
            "steps": step,
            "policy_version": self.served,
            "layout": {n: p.layout for n, p in self.policies.items()},
            "device": _device(self.session.plan),
            "engine": self.recipe.engine.kind,
            **evaluated(self, step),
        }
        self.run.write_summary(result)
        return {"run": str(self.run.path), **result}

    @property
    def _rollouts(self) -> str | None:
        return None if self.recorded is None else str(self.recorded.folder)


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


async def sync_all(t: Training) -> None:
    """Give the engine the weights of every trained policy."""
    for policy in t.policies.values():
        await sync(policy, t.session.engine)


Place = tuple[Path, Literal["float32", "bfloat16"]]
"""Where a policy's model lies, and what it computes in."""


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


def _device(plan: Plan) -> dict[str, Any]:
    return {"kind": plan.device, "gpus": len(plan.gpus), "threads": plan.threads, "ranks": plan.ranks}
