"""A coach at work on a team: every action is scored once, as soon as its tools are done, while the rollout goes on.

By default a coach is agnostic: neither its view nor its task holds a reference (M-06). With `mappa.hindsight` each
action is scored again when the trajectory has ended, with the final files and what followed in view, an aware coach
with the final submission's metrics, and that score counts (X-01); the first one stays in its info.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.config.schema import EngineConfig
from agentrl.grading.tabular import measured
from agentrl.launch.devices import detect, plan
from agentrl.models import resolve
from agentrl.protocols import Coach, CoachView, Engine
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.workflow import Acted
from agentrl.recipes.plugins import named_function
from agentrl.rollout.gate import Gate
from agentrl.scoring.calibration import calibrated
from agentrl.scoring.coach import LLMCoach, make_coach
from agentrl.scoring.ledger import FileLedger
from agentrl.scoring.quoting import cut_middle
from agentrl.scoring.views import view_of
from agentrl.types import Score, Task, Trajectory

AFTERWARDS = "afterwards"
_AFTER_CHARS = 600
Place = tuple[int, int, int, int]


@asynccontextmanager
async def open_coach(recipe: MappaRecipe) -> AsyncIterator[Coach]:
    """The coach that the recipe names, closed at the end, with an engine of its own where it is a local model, which
    computes where the run does.

    Raises `ConfigError` for a bad rule or template, `MissingError` without the service's key or the model, and both as
    `plan` does.
    """
    config, engine, chat, coach = recipe.coach, None, None, None
    if config.kind == "local" and config.replay is None:
        assert config.model is not None
        engine, chat = _local(config.model, recipe)
    try:
        coach = make_coach(config, load=named_function, engine=engine, chat=chat, seed=recipe.run.seed)
        yield coach
    finally:
        if isinstance(coach, LLMCoach):
            await coach.close()
        if engine is not None:
            await engine.close()


async def refuse_absent_coach(recipe: MappaRecipe) -> None:
    """Before a run folder is made: raises what `open_coach` would, but loads no local model's weights."""
    config = recipe.coach
    if config.kind == "local" and config.replay is None:
        assert config.model is not None
        _place(config.model, recipe)
        return
    async with open_coach(recipe):
        pass


@asynccontextmanager
async def open_coaching(recipe: MappaRecipe) -> AsyncIterator[Coaching]:
    """The recipe's coach at work. Raises as `open_coach`."""
    async with open_coach(recipe) as coach:
        coaching = Coaching(recipe, coach)
        try:
            yield coaching
        finally:
            await coaching.close()


def _place(model: str, recipe: MappaRecipe) -> tuple[Path, Literal["cpu", "cuda"]]:
    """The folder of the coach's model and where it computes. A training plans its ranks where it opens its session."""
    device = plan(recipe.launch, detect(), trains=False).device
    return resolve(model), device


def _local(model: str, recipe: MappaRecipe) -> tuple[Engine, Chat]:
    from agentrl.rollout.engine import make_engine

    folder, device = _place(model, recipe)
    engine = make_engine(
        EngineConfig(kind="hf"), {"coach": folder}, dtype="bfloat16", seed=recipe.run.seed, gate=Gate(), device=device
    )
    return engine, Chat(ChatFormat.from_folder(folder), enable_thinking=False)


class Coaching:
    """Scores of actions under way. `watch` is for the workflow, `scores` for who collects its trajectories."""

    def __init__(self, recipe: MappaRecipe, coach: Coach) -> None:
        self._recipe = recipe
        self._coach = coach
        self._acted: dict[str, dict[Place, Acted]] = {}
        self._running: dict[str, dict[Place, asyncio.Task[Score]]] = {}

    def watch(self, acted: Acted) -> None:
        """Begin to score an action, without waiting. Raises `ConfigError` where there is no role or prompt to show."""
        view = self.view(acted)
        name, place = acted.trajectory_id, acted.turn.order
        self._acted.setdefault(name, {})[place] = acted
        self._running.setdefault(name, {})[place] = asyncio.create_task(self._score(view, acted.task))

    async def scores(self, trajectory: Trajectory) -> tuple[Score | None, ...]:
        """One score per turn of a trajectory that has ended, a failed one's completed actions included."""
        running = self._running.pop(trajectory.id, {})
        acted = self._acted.pop(trajectory.id, {})
        order = [turn.order for turn in trajectory.turns]
        first = {place: await task for place, task in running.items()}
        if not self._recipe.mappa.hindsight:
            return tuple(first.get(place) for place in order)
        known = [place for place in order if place in acted]
        views = [self._hindsight(acted[place], [acted[p] for p in known], trajectory) for place in known]
        scoring = (self._score(view, trajectory.task) for view in views)
        again = dict(zip(known, await asyncio.gather(*scoring), strict=True))
        return tuple(_final(first[place], again[place]) if place in again else None for place in order)

    def view(self, acted: Acted, ledger: Mapping[str, Any] | None = None) -> CoachView:
        """What the coach is shown of an action. References are there for the agents of `coach.ground_truth` alone."""
        agent, aware = acted.turn.action.agent, self._recipe.coach.ground_truth
        task = acted.task
        return view_of(
            acted.turn,
            task if agent in aware else replace(task, references=(), info={}),
            role=self._recipe.agents[agent].role,
            observed=acted.observed,
            ledger=files_shown(acted.ledger, agent) if ledger is None else ledger,
            truth=_truth(acted) if agent in aware else None,
            aware=aware,
        )

    async def close(self) -> None:
        """Stop what still runs."""
        tasks = [task for places in self._running.values() for task in places.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()
        self._acted.clear()

    async def _score(self, view: CoachView, task: Task) -> Score:
        config = self._recipe.coach
        score = await self._coach.score(view)
        return score if config.stratum is None else calibrated(score, config.offsets, task.info.get(config.stratum))

    def _hindsight(self, one: Acted, everything: Sequence[Acted], trajectory: Trajectory) -> CoachView:
        agent = one.turn.action.agent
        saved = {name: who for acted in everything for name, who in acted.ledger.saved.items()}
        who_acted = tuple(dict.fromkeys(acted.turn.action.agent for acted in everything))
        last = replace(one.ledger, saved=saved, acted=who_acted)
        ended = replace(one, submission=_final_submission(everything, trajectory))
        return self.view(ended, {**files_shown(last, agent), AFTERWARDS: _afterwards(one, everything, trajectory)})


def files_shown(ledger: FileLedger, agent: str) -> dict[str, Any]:
    """The ledger's view, or nothing where the team has no files at all."""
    return ledger.view(agent) if ledger.saved or ledger.required else {}


def _truth(acted: Acted) -> str | None:
    """The reference answer; where hidden answers of a table are the reference, how well the submission does on them."""
    if acted.task.references:
        return acted.task.references[0]
    return measured(acted.submission, acted.task.info)


def _final_submission(everything: Sequence[Acted], trajectory: Trajectory) -> str | None:
    """What the team handed in; of a rollout that failed on its way, what it had handed in by then."""
    if trajectory.status != "failed":
        return trajectory.answer
    submitted = [acted.submission for acted in everything if acted.submission is not None]
    return submitted[-1] if submitted else None


def _afterwards(one: Acted, everything: Sequence[Acted], trajectory: Trajectory) -> str:
    """What followed an action, as text: the later actions, each with what came of it, and how it all ended."""
    lines = []
    for acted in everything:
        if acted.turn.order > one.turn.order:
            seen = acted.turn.observation
            lines.append(f"{acted.turn.action.agent} then: {cut_middle(acted.turn.action.text, _AFTER_CHARS)}")
            if seen is not None:
                lines.append(f"and the environment: {cut_middle(seen.text, _AFTER_CHARS)}")
    answer = "none" if trajectory.answer is None else cut_middle(trajectory.answer, _AFTER_CHARS)
    lines.append(f"the team's answer: {answer}")
    if trajectory.status != "ok":
        lines.append(f"it ended as {trajectory.status}: {trajectory.status_reason}")
    return "\n".join(lines)


def _final(first: Score, again: Score) -> Score:
    """The score in hindsight. Where that one is missing the score is missing: the first is no stand-in for it."""
    return replace(again, info={**again.info, "immediate": first.value})
