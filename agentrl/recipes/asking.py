"""Answering questions of the user's, for every method: the questions as tasks, and the answers with their traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.config.schema import BaseRecipe, DatasetConfig
from agentrl.data import load_tasks
from agentrl.recipes.collect import collect, jobs_for
from agentrl.recipes.records import untrained_records
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.session import Session
from agentrl.rollout.runner import Workflow
from agentrl.run import Run
from agentrl.types import Score, ScoredTrajectory, Task, Trajectory, Turn


class Ungraded:
    """The reward of rollouts that nobody grades: missing, with that reason."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score(None, "not graded")


def asked(recipe: BaseRecipe, question: str | None, file: Path | None) -> list[Task]:
    """The questions as tasks. A file may hold answers or not; its question column is the recipe's.

    Raises `DataError` for a file that is malformed, naming the line.
    """
    if question is not None:
        return [Task("question", question)]
    columns = {name: column for name, column in recipe.data.columns.items() if name == "question"}
    return load_tasks(DatasetConfig(path=str(file), columns=columns), need_answer=False)


async def answer_all(
    recipe: BaseRecipe, options: VerbOptions, session: Session, run: Run, workflow: Workflow, tasks: list[Task]
) -> dict[str, Any]:
    """Run the questions and write the summary: the answers in the order asked, each with its trace. The trajectories
    lie in the run folder."""
    writer = run.open_step(0)
    collected = await collect(
        session,
        jobs_for(tasks, 1, "infer", 0),
        workflow,
        Ungraded(),
        max_concurrent=recipe.rollout.max_concurrent,
        writer=writer,
        progress=options.progress,
        label="answers",
    )
    writer.commit(untrained_records(collected.scored, save_prompt_ids=recipe.run.save_prompt_ids))
    answers = [_answer(scored) for scored in collected.scored]
    result: dict[str, Any] = {
        "method": recipe.method,
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
