"""`agentrl recursivemas eval`: the held-out questions answered by the ring and, side by side, by each control.

Everything answers the same questions with the same models, loaded once, in batches of the same size, and each answer
draws the same random numbers in every row. Grading comes last and is in no row's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.config.schema import DatasetConfig
from agentrl.data import BENCHMARKS, load_tasks
from agentrl.errors import ConfigError, DataError
from agentrl.files import encode
from agentrl.launch.devices import detect, plan
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.quiet import quiet_libraries
from agentrl.recipes.records import untrained_records
from agentrl.recipes.recursivemas.comparison import NOT_REPRODUCED, RING, Measured, compare, reductions
from agentrl.recipes.recursivemas.controls import Crossed, crossed_batches, shuffled, single_prompts, zeroed
from agentrl.recipes.recursivemas.decode import Decoder, open_decoder
from agentrl.recipes.recursivemas.held_out import grade
from agentrl.recipes.recursivemas.infer import (
    UNTRAINED,
    Answered,
    answer_batch,
    decode_all,
    refuse_long,
    trajectories,
)
from agentrl.recipes.recursivemas.link_folders import refuse_untrained
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import sender
from agentrl.recipes.recursivemas.setup import Loaded, load_system
from agentrl.recipes.recursivemas.text_team import TextTeam
from agentrl.recipes.registry import Progress, VerbOptions
from agentrl.recipes.rewards import open_reward
from agentrl.recipes.session import open_run
from agentrl.run import Run
from agentrl.types import Task

_WARM_UP = 2  # latent steps, tokens of a message and tokens of an answer


@dataclass(frozen=True, slots=True)
class Setting:
    """What every row answers with."""

    recipe: RecursiveRecipe
    loaded: Loaded
    decoder: Decoder
    team: TextTeam | None

    async def answer(self, name: str, batch: Crossed) -> Answered:
        """A batch of questions as one row answers them."""
        recipe, tasks, k = self.recipe, batch.tasks, self.recipe.recursivemas.decodes
        plain = sender(self.loaded.system)
        if name == "single":
            start = time.perf_counter()
            prompts = single_prompts(self.loaded.system, recipe.recursivemas, tasks)
            asking_s = time.perf_counter() - start
            said, took_s, positions = await decode_all(self.decoder, tasks, prompts, "eval", k)
            return Answered(tasks, said, (), 0.0, asking_s + took_s, positions)
        if name == "text":
            assert self.team is not None, "a text team is set up when it is among the controls"
            written = self.team.write(tasks, "eval")
            said, took_s, positions = await decode_all(self.decoder, tasks, written.prompts, "eval", k)
            writing_s = sum(stage.seconds for stage in written.stages)
            decoding_s = written.asking_s + took_s
            return Answered(tasks, said, (), writing_s, decoding_s, positions, written.stages, written.cut)
        if name == "none":
            recipe, send = _with(recipe, latent_steps=0), plain
        else:
            graph, rounds = recipe.recursivemas.graph, recipe.recursivemas.rounds
            crossed = shuffled(plain, batch.order, graph.decoder, rounds)
            send = {"zero": zeroed(plain), "shuffled": crossed}.get(name, plain)
        return await answer_batch(recipe, self.loaded, self.decoder, tasks, "eval", send, k)


def evaluate(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """Answer and grade the held-out set; returns the comparison (see `comparison`), which the summary holds too.

    Raises `DataError` for data that is missing or malformed, for a question that no window holds, and for answers that
    are too much alike to shuffle; `ConfigError` for links that are untrained without leave.
    """
    refuse_untrained(recipe)
    tasks = held_out_tasks(recipe)
    batches = {name: batches_of(recipe, name, tasks) for name in (RING, *recipe.recursivemas.chosen_controls)}
    with (
        open_run(recipe, "eval") as run,
        interruptible(options.progress.note),
        quiet_libraries(),
    ):
        return asyncio.run(_evaluate(recipe, options.progress, run, tasks, batches))


def held_out_tasks(recipe: RecursiveRecipe) -> list[Task]:
    """The tasks of `data.eval`, or those of `data` for a recipe that trains nothing and names no held-out set.

    Raises `DataError` where there are none, and `ConfigError` for a benchmark whose answers have another form than
    `recursivemas.answer` asks for.
    """
    key, dataset = "data.eval", recipe.data.eval
    if dataset.path is None and recipe.run.steps == 0:
        key, dataset = "data", recipe.data
    if dataset.path is None:
        raise DataError(f"{key}.path: no held-out set is named", "name a file or a set (agentrl data list)")
    public = benchmark_of(dataset)
    if public is None:
        return load_tasks(dataset)
    form = BENCHMARKS[public].answer if public in BENCHMARKS else None
    if form is not None and recipe.reward is None and form != recipe.recursivemas.answer:
        raise ConfigError(
            f"{key}: answers of {public} have the form {form}, recursivemas.answer is {recipe.recursivemas.answer}",
            f"set recursivemas.answer={form}",
        )
    return load_tasks(dataset, need_answer=form != "code", seed=recipe.run.seed)


def benchmark_of(dataset: DatasetConfig) -> str | None:
    """The public benchmark that a section reads; None for a set of the user's or an embedded one."""
    return dataset.format or (dataset.path if dataset.path in BENCHMARKS else None)


def _note_protocol(recipe: RecursiveRecipe, tasks: Sequence[Task], progress: Progress) -> None:
    """Say where a benchmark's published numbers come from more answers to a question than are sampled here."""
    public = str(tasks[0].info.get("benchmark"))
    wanted = BENCHMARKS[public].decodes if public in BENCHMARKS else 1
    if wanted > recipe.recursivemas.decodes:
        hint = f"--set recursivemas.decodes={wanted}"
        progress.note(f"published numbers on {public} count any of {wanted} answers to a question: {hint}")


def batches_of(recipe: RecursiveRecipe, name: str, tasks: Sequence[Task]) -> list[Crossed]:
    """Who thinks together: questions in order, or for shuffled latents beside those that they hear of. Raises
    `DataError` where too many answers are equal to shuffle."""
    size = recipe.recursivemas.max_batch
    if name == "shuffled":
        return crossed_batches(tasks, size, recipe.run.seed)
    groups = [tuple(tasks[at : at + size]) for at in range(0, len(tasks), size)]
    return [Crossed(group, tuple(range(len(group)))) for group in groups]


async def _evaluate(
    recipe: RecursiveRecipe, progress: Progress, run: Run, tasks: list[Task], batches: dict[str, list[Crossed]]
) -> dict[str, Any]:
    torch.set_num_threads(plan(recipe.launch, detect()).threads)
    begin = time.perf_counter()
    loaded = load_system(recipe)
    load_s = time.perf_counter() - begin
    if not loaded.links.trained:
        progress.note(UNTRAINED)
    _note_protocol(recipe, tasks, progress)
    refuse_long(recipe, loaded, tasks)
    answered: dict[str, tuple[list[Answered], float]] = {}
    async with open_decoder(recipe, loaded) as decoder:
        setting = Setting(recipe, loaded, decoder, TextTeam(recipe, loaded) if "text" in batches else None)
        start = time.perf_counter()
        await warm_up(setting, batches)
        warm_up_s = time.perf_counter() - start
        for name, todo in batches.items():
            answered[name] = await answer_row(setting, name, todo, progress)
    start = time.perf_counter()
    measured = await _graded(recipe, run, answered)
    grading_s = time.perf_counter() - start
    rows = compare(recipe, measured)
    result: dict[str, Any] = {
        "method": "recursivemas",
        "style": recipe.recursivemas.style,
        "rounds": recipe.recursivemas.rounds,
        "latent_steps": recipe.recursivemas.latent_steps,
        "answers_per_question": recipe.recursivemas.decodes,
        "text_team": recipe.recursivemas.text_team.model_dump() if "text" in rows else None,
        "links": {
            "trained": loaded.links.trained,
            "parameters": loaded.links.num_parameters,
            "training": dict(loaded.links.training),
        },
        "eval": rows[RING]["strict"],
        "controls": rows,
        "reductions": reductions(rows),
        "seconds": {
            "load": round(load_s, 3),
            "warm_up": round(warm_up_s, 3),
            "grading": round(grading_s, 3),
            "total": round(time.perf_counter() - begin, 3),
        },
        "not_reproduced": list(NOT_REPRODUCED),
    }
    run.write_summary(result)
    return {"run": str(run.path), **result}


async def answer_row(
    setting: Setting, name: str, batches: Sequence[Crossed], progress: Progress
) -> tuple[list[Answered], float]:
    """All batches of a row, and the wall seconds that they took."""
    total, done = sum(len(batch.tasks) for batch in batches), 0
    out = []
    start = time.perf_counter()
    for batch in batches:
        progress.phase(name, done, total)
        out.append(await setting.answer(name, batch))
        done += len(batch.tasks)
    wall_s = time.perf_counter() - start
    progress.phase(name, total, total)
    return out, wall_s


async def warm_up(setting: Setting, batches: dict[str, list[Crossed]]) -> None:
    """Everything once, on the first batch and cut short, so that no row pays for what is only done once."""
    steps = min(_WARM_UP, setting.recipe.recursivemas.latent_steps)
    short = _with(setting.recipe, latent_steps=steps, decodes=1)
    team = None
    if setting.team is not None:
        text_team = short.recursivemas.text_team.model_copy(update={"max_tokens": _WARM_UP})
        team = TextTeam(_with(short, text_team=text_team), setting.loaded)
    brief = Setting(short, setting.loaded, setting.decoder.limited(_WARM_UP), team)
    for name in (RING, "single", "text"):
        if name in batches:
            await brief.answer(name, batches[name][0])


async def _graded(
    recipe: RecursiveRecipe, run: Run, answered: dict[str, tuple[list[Answered], float]]
) -> list[Measured]:
    """Every answer graded, and on disk: the ring's with the run's trajectories, each control's in `evals/`."""
    measured = []
    async with open_reward(recipe.grader) as reward:
        for name, (batches, wall_s) in answered.items():
            told = [one for batch in batches for one in trajectories(recipe, batch)]
            scored = await grade(reward, told)
            measured.append(Measured(name, tuple(batches), tuple(scored), wall_s))
            records = untrained_records(scored)
            if name == RING:
                run.open_step(0).commit(records)
            else:
                run.write_file(f"evals/{name}.jsonl", b"".join(encode(record) + b"\n" for record in records))
    return measured


def _with(recipe: RecursiveRecipe, **own: Any) -> RecursiveRecipe:
    return recipe.model_copy(update={"recursivemas": recipe.recursivemas.model_copy(update=own)})
