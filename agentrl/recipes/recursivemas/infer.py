"""`agentrl recursivemas infer`: answer questions, and show what each agent thought on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks
from agentrl.errors import DataError
from agentrl.launch.devices import detect, plan
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.records import untrained_records
from agentrl.recipes.recursivemas.config import RecursiveRecipe
from agentrl.recipes.recursivemas.decode import Decoder, answer_of, open_decoder
from agentrl.recipes.recursivemas.links import links_folder
from agentrl.recipes.recursivemas.recursion import Recursion, Send, Stage, run_rounds, sender, thinker, too_long
from agentrl.recipes.recursivemas.setup import Loaded, load_system
from agentrl.recipes.registry import Progress, VerbOptions
from agentrl.recipes.session import open_run
from agentrl.run import Run
from agentrl.types import Action, Score, ScoredTrajectory, Task, Trajectory, Turn

UNTRAINED = "the links are untrained: their answers mean nothing"


@dataclass(frozen=True, slots=True)
class Answered:
    """A batch of questions: the decoder's actions, the stages before them, and the seconds of both parts."""

    tasks: tuple[Task, ...]
    actions: tuple[Action, ...]
    stages: tuple[Stage, ...]
    thinking_s: float
    decoding_s: float


async def answer_batch(
    recipe: RecursiveRecipe,
    loaded: Loaded,
    decoder: Decoder,
    tasks: Sequence[Task],
    phase: str,
    send: Send | None = None,
) -> Answered:
    """All rounds for a batch, then one decode. `send` replaces the plain links (controls)."""
    config = recipe.recursivemas
    start = time.perf_counter()
    thought: Recursion = run_rounds(
        loaded.system,
        config,
        tasks,
        thinker(config.latent_steps),
        send or sender(loaded.system),
    )
    middle = time.perf_counter()
    actions = await decoder.answer(tasks, thought.prompts, phase)
    end = time.perf_counter()
    return Answered(tuple(tasks), tuple(actions), thought.stages, middle - start, end - middle)


async def answer_tasks(
    recipe: RecursiveRecipe,
    loaded: Loaded,
    decoder: Decoder,
    tasks: Sequence[Task],
    phase: str,
    send: Callable[[Sequence[Task]], Send] | None = None,
    progress: Progress | None = None,
    label: str = "answers",
) -> list[Answered]:
    """Every question, `recursivemas.max_batch` at a time and in order. `send` makes the links' replacement for a batch
    (controls: what a block is exchanged for depends on who thinks together). A question
    that exceeds a window ends it all, so ask `refuse_long` first."""
    size = recipe.recursivemas.max_batch
    batches: list[Answered] = []
    for at in range(0, len(tasks), size):
        if progress is not None:
            progress.phase(label, at, len(tasks))
        batch = tasks[at : at + size]
        sent = None if send is None else send(batch)
        batches.append(await answer_batch(recipe, loaded, decoder, batch, phase, sent))
    if progress is not None:
        progress.phase(label, len(tasks), len(tasks))
    return batches


def infer(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """Answer `--question`, or every row of `--input`.

    Returns answers in the order asked with their counts, the trace per round, and timings with load apart; the
    trajectories lie in the run folder. Raises `DataError` for an input file that is malformed, naming the line.
    """
    tasks = asked(recipe, options.question, options.input_file)
    if recipe.recursivemas.links is not None:
        links_folder(recipe.recursivemas.links, recipe.run.dir)  # before a run folder is made
    with (
        open_run(recipe, "infer") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_infer(recipe, options, run, tasks))


def asked(recipe: RecursiveRecipe, question: str | None, file: Path | None) -> list[Task]:
    """The questions as tasks. A file may hold answers or not; its question column is the recipe's."""
    if question is not None:
        return [Task("question", question)]
    columns = {name: column for name, column in recipe.data.columns.items() if name == "question"}
    return load_tasks(DatasetConfig(path=str(file), columns=columns), need_answer=False)


def refuse_long(recipe: RecursiveRecipe, loaded: Loaded, tasks: Sequence[Task]) -> None:
    """Raises `DataError` for the first question that does not fit some agent's window."""
    for task in tasks:
        why = too_long(loaded.system, recipe.recursivemas, task)
        if why is not None:
            raise DataError(f"question {task.id}: {why}", "shorten it, or lower recursivemas.latent_steps")


async def _infer(recipe: RecursiveRecipe, options: VerbOptions, run: Run, tasks: list[Task]) -> dict[str, Any]:
    torch.set_num_threads(plan(recipe.launch, detect()).threads)
    start = time.perf_counter()
    loaded = load_system(recipe)
    load_s = time.perf_counter() - start
    if not loaded.links.trained:
        options.progress.note(UNTRAINED)
    refuse_long(recipe, loaded, tasks)
    begin = time.perf_counter()
    async with open_decoder(recipe, loaded) as decoder:
        batches = await answer_tasks(recipe, loaded, decoder, tasks, "infer", progress=options.progress)
    total_s = time.perf_counter() - begin
    scored = [trajectory for batch in batches for trajectory in trajectories(recipe, batch)]
    writer = run.open_step(0)
    writer.commit(untrained_records(scored))
    result: dict[str, Any] = {
        "method": "recursivemas",
        "style": recipe.recursivemas.style,
        "rounds": recipe.recursivemas.rounds,
        "latent_steps": recipe.recursivemas.latent_steps,
        "links": {"trained": loaded.links.trained, "parameters": loaded.links.num_parameters},
        "answers": [_answer(s, batch.stages, row) for batch, row, s in _rows(batches, scored)],
        "seconds": {
            "load": round(load_s, 3),
            "thinking": round(sum(b.thinking_s for b in batches), 3),
            "decoding": round(sum(b.decoding_s for b in batches), 3),
            "total": round(total_s, 3),
        },
    }
    run.write_summary(result)
    return {"run": str(run.path), **result}


def trajectories(recipe: RecursiveRecipe, batch: Answered) -> list[ScoredTrajectory]:
    """One trajectory per question, with its only text turn and what all agents spent in its counts; not graded."""
    graph, rounds = recipe.recursivemas.graph, recipe.recursivemas.rounds
    place = graph.agents.index(graph.decoder)
    out = []
    for row, (task, action) in enumerate(zip(batch.tasks, batch.actions, strict=True)):
        answer = answer_of(recipe.recursivemas.answer, action.text)
        ended = action.completion.finish_reason == "stop"
        trajectory = Trajectory(
            id=f"{task.id}/0",
            task=task,
            g=0,
            turns=(Turn(action, None, rounds, place),),
            answer=answer,
            status="ok" if ended else "truncated",
            status_reason=None if ended else f"the answer was cut at {len(action.completion.ids)} tokens",
            counts=counts_of(batch.stages, row, action),
        )
        out.append(ScoredTrajectory(trajectory, Score(None, "not graded"), (None,)))
    return out


def counts_of(stages: Sequence[Stage], row: int, action: Action) -> dict[str, float]:
    """What one question cost, kept apart: sampled text tokens, latent steps, positions that went through a model
    (thinking and decoding; padding not counted), and prompt positions that a round took over from the one before."""
    text, prompt = len(action.completion.ids), len(action.request.prompt)
    return {
        "text_tokens": text,
        "latent_steps": sum(s.actions[row].steps for s in stages),
        "rollouts": len(stages),
        "prompt_positions": sum(s.prompt_positions[row] for s in stages) + prompt,
        "reused_positions": sum(s.reused[row] for s in stages),
        # The last sampled token is not fed back.
        "positions": sum(s.actions[row].positions for s in stages) + prompt + text - 1,
    }


def _rows(
    batches: Sequence[Answered], scored: Sequence[ScoredTrajectory]
) -> list[tuple[Answered, int, ScoredTrajectory]]:
    places = [(batch, row) for batch in batches for row in range(len(batch.tasks))]
    return [(batch, row, one) for (batch, row), one in zip(places, scored, strict=True)]


def _answer(scored: ScoredTrajectory, stages: Sequence[Stage], row: int) -> dict[str, Any]:
    trajectory = scored.trajectory
    return {
        "id": trajectory.task.id,
        "question": trajectory.task.question,
        "answer": trajectory.answer,
        "text": trajectory.turns[0].action.text,
        "status": trajectory.status,
        "status_reason": trajectory.status_reason,
        "counts": dict(trajectory.counts),
        "trace": [_traced(stage, row) for stage in stages],
    }


def _traced(stage: Stage, row: int) -> dict[str, Any]:
    action = stage.actions[row]
    return {
        "round": stage.round,
        "agent": stage.agent,
        "steps": action.steps,
        "positions": action.positions,
        "reused": stage.reused[row],
        "state_norm": round(sum(action.norms) / len(action.norms), 3) if action.norms else None,
        "sent_norm": {name: round(norm, 3) for name, norm in stage.sent_norm.items()},
    }
