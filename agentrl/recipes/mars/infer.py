"""`agentrl mars infer`: answer questions of the user's, and show who said what on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.config.load import dump_yaml
from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks
from agentrl.recipes.collect import collect, jobs_for
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.setup import make_workflow, window
from agentrl.recipes.records import untrained_records
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import open_session
from agentrl.run import Run
from agentrl.types import Score, ScoredTrajectory, Task, Trajectory, Turn


class Ungraded:
    """The reward of rollouts that nobody grades: missing, with that reason."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(None, "not graded")


def infer(recipe: MarsRecipe, options: VerbOptions) -> dict[str, Any]:
    """Answer `--question`, or every row of `--input`, with `run.eval_temperature`.

    Returns the answers in the order asked, each with its trace; the trajectories lie in the run folder. Raises
    `DataError` for an input file that is malformed, naming the line.
    """
    tasks = asked(recipe, options.question, options.input_file)
    with (
        Run.create(recipe.run.dir, recipe.run.name, dump_yaml(recipe), seed=recipe.run.seed, stem="mars-infer") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_infer(recipe, options, run, tasks))


def asked(recipe: MarsRecipe, question: str | None, file: Path | None) -> list[Task]:
    """The questions as tasks. A file may hold answers or not; its question column is the recipe's."""
    if question is not None:
        return [Task("question", question)]
    columns = {name: column for name, column in recipe.data.columns.items() if name == "question"}
    return load_tasks(DatasetConfig(path=str(file), columns=columns), need_answer=False)


async def _infer(recipe: MarsRecipe, options: VerbOptions, run: Run, tasks: list[Task]) -> dict[str, Any]:
    async with open_session(recipe, seed=recipe.run.seed, window=window(recipe)) as session:
        writer = run.open_step(0)
        collected = await collect(
            session,
            jobs_for(tasks, 1, "infer", 0),
            make_workflow(recipe, session, temperature=recipe.run.eval_temperature),
            Ungraded(),
            max_concurrent=recipe.rollout.max_concurrent,
            writer=writer,
            progress=options.progress,
            label="answers",
        )
        writer.commit(untrained_records(collected.scored, save_prompt_ids=recipe.run.save_prompt_ids))
    answers = [_answer(scored) for scored in collected.scored]
    result: dict[str, Any] = {
        "method": "mars",
        "engine": recipe.engine.kind,
        "statuses": dict(sorted(Counter(answer["status"] for answer in answers).items())),
        "answers": answers,
    }
    run.write_summary(result)
    return {"run": str(run.path), **result}


def _answer(scored: ScoredTrajectory) -> dict[str, Any]:
    trajectory = scored.trajectory
    return {
        "id": trajectory.task.id,
        "question": trajectory.task.question,
        "answer": trajectory.answer,
        "status": trajectory.status,
        "status_reason": trajectory.status_reason,
        "turns": [_said(turn) for turn in trajectory.turns],
    }


def _said(turn: Turn) -> dict[str, Any]:
    seen = turn.observation
    return {
        "turn": turn.turn,
        "agent": turn.action.agent,
        "parent": turn.parent,
        "text": turn.action.text,
        "tool": seen.tool if seen else None,
        "purpose": seen.purpose if seen else None,
        "observation": seen.text if seen else None,
    }
