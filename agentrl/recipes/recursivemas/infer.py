"""`agentrl recursivemas infer`: answer questions, and show what each agent thought on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks
from agentrl.errors import DataError
from agentrl.launch.devices import detect, plan
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.quiet import quiet_libraries
from agentrl.recipes.records import untrained_records
from agentrl.recipes.recursivemas.decode import Decoder, answer_of, open_decoder
from agentrl.recipes.recursivemas.link_folders import refuse_untrained
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import Recursion, Send, Stage, run_rounds, sender, thinker, too_long
from agentrl.recipes.recursivemas.setup import Loaded, load_system
from agentrl.recipes.recursivemas.text_team import TextStage
from agentrl.recipes.recursivemas.tool_loop import Said, counts_of_calls
from agentrl.recipes.registry import Progress, VerbOptions
from agentrl.recipes.session import open_run
from agentrl.run import Run
from agentrl.types import Action, Prompt, Score, ScoredTrajectory, Task, Trajectory, Turn

UNTRAINED = "the links are untrained: their answers mean nothing"


@dataclass(frozen=True, slots=True)
class Answered:
    """A batch of questions: what the decoder wrote (`decodes[g][row]`), the stages before it (`stages` of latents or
    `written` of text), the seconds of both parts, and the positions that all decodes computed together."""

    tasks: tuple[Task, ...]
    decodes: tuple[tuple[Said, ...], ...]
    stages: tuple[Stage, ...]
    thinking_s: float
    decoding_s: float
    decoded_positions: int
    written: tuple[TextStage, ...] = ()
    cut: tuple[int, ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        """The beginning of the first answer to each question, from the last prompt of the recursion."""
        return tuple(said.actions[0] for said in self.decodes[0])


async def answer_batch(
    recipe: RecursiveRecipe,
    loaded: Loaded,
    decoder: Decoder,
    tasks: Sequence[Task],
    phase: str,
    send: Send | None = None,
    decodes: int = 1,
) -> Answered:
    """All rounds for a batch, then `decodes` answers from its latents. `send` replaces the plain links (controls)."""
    config = recipe.recursivemas
    start = time.perf_counter()
    thought: Recursion = run_rounds(
        loaded.system,
        config,
        tasks,
        thinker(config.latent_steps),
        send or sender(loaded.system),
    )
    thinking_s = time.perf_counter() - start - thought.asking_s
    said, seconds, positions = await decode_all(decoder, tasks, thought.prompts, phase, decodes)
    return Answered(tuple(tasks), said, thought.stages, thinking_s, thought.asking_s + seconds, positions)


async def decode_all(
    decoder: Decoder, tasks: Sequence[Task], prompts: Sequence[Prompt], phase: str, decodes: int
) -> tuple[tuple[tuple[Said, ...], ...], float, int]:
    """`decodes` answers from each prompt, the seconds that they took, and the positions computed for them."""
    start, before = time.perf_counter(), decoder.computed
    said = tuple([tuple(await decoder.answer(tasks, prompts, phase, g)) for g in range(decodes)])
    return said, time.perf_counter() - start, decoder.computed - before


async def answer_tasks(
    recipe: RecursiveRecipe,
    loaded: Loaded,
    decoder: Decoder,
    tasks: Sequence[Task],
    phase: str,
    progress: Progress | None = None,
    label: str = "answers",
) -> list[Answered]:
    """Every question, `recursivemas.max_batch` at a time and in order. A question that exceeds a window ends it all, so
    ask `refuse_long` first."""
    size = recipe.recursivemas.max_batch
    batches: list[Answered] = []
    for at in range(0, len(tasks), size):
        if progress is not None:
            progress.phase(label, at, len(tasks))
        batch = tasks[at : at + size]
        batches.append(await answer_batch(recipe, loaded, decoder, batch, phase))
    if progress is not None:
        progress.phase(label, len(tasks), len(tasks))
    return batches


def infer(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """Answer `--question`, or every row of `--input`; without either, the recipe's sample.

    Returns answers in the order asked with their counts, the trace per round, and timings with load apart; the
    trajectories lie in the run folder. Raises `DataError` for an input file that is malformed, naming the line, and
    `ConfigError` for untrained links that are not allowed.
    """
    refuse_untrained(recipe)
    tasks = asked(recipe, options.question, options.input_file)
    with (
        open_run(recipe, "infer") as run,
        interruptible(options.progress.note),
        quiet_libraries(),
    ):
        return asyncio.run(_infer(recipe, options, run, tasks))


def asked(recipe: RecursiveRecipe, question: str | None, file: Path | None) -> list[Task]:
    """The questions as tasks. A file may hold answers or not; its question column is the recipe's."""
    if question is not None:
        return [Task("question", question)]
    if file is None:
        return sample_questions(recipe)
    columns = {name: column for name, column in recipe.data.columns.items() if name == "question"}
    return load_tasks(DatasetConfig(path=str(file), columns=columns), need_answer=False)


def sample_questions(recipe: RecursiveRecipe) -> list[Task]:
    """The recipe's sample, or the first question of its held-out or training set. Raises `DataError` without any."""
    if recipe.recursivemas.sample is not None:
        return [Task("sample", recipe.recursivemas.sample)]
    for dataset in (recipe.data.eval, recipe.data):
        if dataset.path is not None:
            return load_tasks(dataset, need_answer=False)[:1]
    raise DataError("infer: no question is given, and the recipe has no data", "ask one: --question 'How far is it?'")


def refuse_long(recipe: RecursiveRecipe, loaded: Loaded, tasks: Sequence[Task]) -> None:
    """Raises `DataError` for the first question that does not fit some agent's window."""
    for task in tasks:
        why = too_long(loaded.system, recipe.recursivemas, task, recipe.engine.max_model_len)
        if why is not None:
            raise DataError(f"question {task.id}: {why}", "shorten it, or lower recursivemas.latent_steps")


async def _infer(recipe: RecursiveRecipe, options: VerbOptions, run: Run, tasks: list[Task]) -> dict[str, Any]:
    torch.set_num_threads(plan(recipe.launch, detect()).threads)
    start = time.perf_counter()
    loaded = load_system(recipe)
    if not loaded.links.trained:
        options.progress.note(UNTRAINED)
    refuse_long(recipe, loaded, tasks)
    async with open_decoder(recipe, loaded) as decoder:
        begin = time.perf_counter()
        batches = await answer_tasks(recipe, loaded, decoder, tasks, "infer", progress=options.progress)
        total_s = time.perf_counter() - begin
    load_s = begin - start
    scored = [trajectory for batch in batches for trajectory in trajectories(recipe, batch)]
    writer = run.open_step(0)
    writer.commit(untrained_records(scored))
    result: dict[str, Any] = {
        "method": "recursivemas",
        "style": recipe.recursivemas.style,
        "rounds": recipe.recursivemas.rounds,
        "latent_steps": recipe.recursivemas.latent_steps,
        "links": {
            "trained": loaded.links.trained,
            "parameters": loaded.links.num_parameters,
            "by_link": loaded.links.parameter_counts,
        },
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
    """One trajectory per answer, question by question, with every text turn and what all agents spent in its counts;
    not graded. Of several answers to a question the first carries what was spent before them."""
    return [
        ScoredTrajectory(one, Score(None, "not graded"), (None,) * len(one.turns))
        for row in range(len(batch.tasks))
        for one in (_trajectory(recipe, batch, row, g) for g in range(len(batch.decodes)))
    ]


def _trajectory(recipe: RecursiveRecipe, batch: Answered, row: int, g: int) -> Trajectory:
    graph, rounds = recipe.recursivemas.graph, recipe.recursivemas.rounds
    task, said = batch.tasks[row], batch.decodes[g][row]
    ended = said.ended
    stages, written = (batch.stages, batch.written) if g == 0 else ((), ())
    counts = counts_of(stages, row, said)
    if written:
        counts = _with_messages(counts, written, row, batch.cut[row])
    if recipe.decoder.tools:
        counts |= counts_of_calls([said])
    turns = [Turn(s.actions[row], None, s.round, graph.agents.index(s.agent)) for s in written]
    replies = (*said.replies, None)
    place, kind = graph.agents.index(graph.decoder), recipe.recursivemas.answer
    turns += [Turn(a, replies[call], rounds, place, call) for call, a in enumerate(said.actions)]
    return Trajectory(
        id=f"{task.id}/{g}",
        task=task,
        g=g,
        turns=tuple(turns),
        # A short answer is what was written last; any other says itself where it stands.
        answer=answer_of(kind, said.actions[-1].text if kind == "short" else said.text),
        status="ok" if ended else "truncated",
        status_reason=None if ended else f"the answer was cut at {said.num_tokens} tokens",
        counts=counts,
    )


def counts_of(stages: Sequence[Stage], row: int, said: Said) -> dict[str, float]:
    """What one question cost, kept apart: sampled text tokens, latent steps, positions that went through a model
    (thinking and decoding; padding not counted), and prompt positions that a round took over from the one before. A
    rollout of no step (m = 0) reads nothing and counts for nothing."""
    prompt = len(said.actions[0].request.prompt)
    worked = [s for s in stages if s.actions[row].steps]
    return {
        "text_tokens": said.num_tokens,
        "latent_steps": sum(s.actions[row].steps for s in worked),
        "rollouts": len(worked),
        "prompt_positions": sum(s.prompt_positions[row] for s in worked) + prompt,
        "reused_positions": sum(s.reused[row] for s in worked),
        # The last sampled token is not fed back. After a tool's result everything before it is read again.
        "positions": sum(s.actions[row].positions for s in worked)
        + sum(len(a.request.prompt) + len(a.completion.ids) - 1 for a in said.actions),
    }


def _with_messages(
    counts: Mapping[str, float], written: Sequence[TextStage], row: int, last_cut: int
) -> dict[str, float]:
    """The same for a text team, whose messages are text tokens."""
    messages = [(s.actions[row], s.reused[row], s.computed[row], s.cut[row]) for s in written]
    tokens = sum(len(action.completion.ids) for action, *_ in messages)
    return {
        **counts,
        "text_tokens": counts["text_tokens"] + tokens,
        "messages": len(messages),
        "message_tokens": tokens,
        "prompt_positions": counts["prompt_positions"] + sum(len(a.request.prompt) for a, *_ in messages),
        "reused_positions": sum(reused for _, reused, _, _ in messages),
        "positions": counts["positions"] + sum(computed for _, _, computed, _ in messages),
        "cut_tokens": sum(cut for *_, cut in messages) + last_cut,
    }


def _rows(
    batches: Sequence[Answered], scored: Sequence[ScoredTrajectory]
) -> list[tuple[Answered, int, ScoredTrajectory]]:
    places = [(batch, row) for batch in batches for row in range(len(batch.tasks))]
    return [(batch, row, one) for (batch, row), one in zip(places, scored, strict=True)]


def _answer(scored: ScoredTrajectory, stages: Sequence[Stage], row: int) -> dict[str, Any]:
    trajectory = scored.trajectory
    seen = [turn.observation for turn in trajectory.turns if turn.observation is not None]
    return {
        "id": trajectory.task.id,
        "question": trajectory.task.question,
        "answer": trajectory.answer,
        "text": "".join(turn.action.text for turn in trajectory.turns),
        "calls": [{"tool": o.tool, "error": o.error, "result": o.text} for o in seen],
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
        "sent_norm": {name: round(norms[row], 3) for name, norms in stage.sent_norms.items()},
    }
