"""What a training run measures on held-out questions: answers where they are decoded, and losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentrl.errors import DataError
from agentrl.protocols import Reward
from agentrl.recipes.records import untrained_records
from agentrl.recipes.recursivemas.config import RecursiveRecipe
from agentrl.recipes.recursivemas.decode import Decoder
from agentrl.recipes.recursivemas.infer import Answered, answer_tasks, trajectories
from agentrl.recipes.recursivemas.losses import inner_loss, outer_loss
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.recipes.recursivemas.recursion import System, too_long
from agentrl.recipes.recursivemas.setup import Loaded
from agentrl.recipes.recursivemas.texts import Texts
from agentrl.recipes.registry import Progress
from agentrl.rollout.latent_answer import text_logprobs, text_loss, text_states
from agentrl.run import Run
from agentrl.types import Prompt, Score, ScoredTrajectory, Task

_LONGEST = 32  # questions whose ids are counted before a run


@dataclass(frozen=True, slots=True)
class HeldOut:
    """`items`: each task's score (1.0 right; stage inner: mean cosine of its agents' links), None where it is missing.
    `losses`: mean cross-entropy of the answers' tokens, `as_used` after the recursion as it is used and, for the leak
    probe, `as_trained` in the form of training."""

    items: Mapping[str, float | None]
    losses: Mapping[str, float]


async def grade(reward: Reward, trajectories: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """With outcomes. A grader that raises gives a missing score with its reason, never a number."""
    out = []
    for one in trajectories:
        try:
            outcome = await reward.score(one.trajectory.task, one.trajectory)
        except Exception as error:  # noqa: BLE001 - a grader's fault is a missing score, counted
            outcome = Score(None, f"{type(error).__name__}: {error}")
        out.append(ScoredTrajectory(one.trajectory, outcome, one.action_scores))
    return out


async def answered_held_out(
    recipe: RecursiveRecipe,
    loaded: Loaded,
    decoder: Decoder,
    reward: Reward,
    tasks: Sequence[Task],
    texts: Texts,
    run: Run,
    step: int,
    progress: Progress,
) -> HeldOut:
    """All questions answered and graded; their trajectories go to `evals/step_NNNNNN.jsonl`."""
    batches = await answer_tasks(recipe, loaded, decoder, tasks, "eval", progress=progress, label="evaluation")
    scored = await grade(reward, [one for batch in batches for one in trajectories(recipe, batch)])
    lines = [json.dumps(record, ensure_ascii=False) for record in untrained_records(scored)]
    run.write_file(f"evals/step_{step:06d}.jsonl", "".join(line + "\n" for line in lines))
    losses = {"as_used": used_loss(loaded.system, batches, texts)}
    if recipe.recursivemas.train.leak_probe:
        losses["as_trained"] = trained_loss(recipe, loaded.system, tasks, texts)
    return HeldOut({one.trajectory.task.id: one.outcome.value for one in scored}, losses)


@torch.no_grad()
def used_loss(system: System, batches: Sequence[Answered], texts: Texts) -> float:
    """Mean cross-entropy per answer token after the prompts that the decoder answered from."""
    backbone = system.agents[system.graph.decoder].backbone
    total = tokens = 0.0
    for batch in batches:
        answers = texts.answers_of(batch.tasks)
        states = text_states(backbone, [action.request.prompt for action in batch.actions], answers)
        number = sum(map(len, answers))
        total += float(text_loss(text_logprobs(backbone, states), states)) * number
        tokens += number
    return total / tokens


@torch.no_grad()
def trained_loss(recipe: RecursiveRecipe, system: System, tasks: Sequence[Task], texts: Texts) -> float:
    """The same in the form that the links are trained in, known texts included."""
    config = recipe.recursivemas
    size = 1 if config.train.form == "teacher_forced" else config.max_batch
    total = tokens = 0.0
    for at in range(0, len(tasks), size):
        batch = tasks[at : at + size]
        known = {agent: texts.of(agent, batch) for agent in system.graph.agents}
        answers = texts.answers_of(batch)
        last = outer_loss(system, config, batch, answers, form=config.train.form, texts=known).by_round[-1]
        assert last is not None
        number = sum(map(len, answers))
        total += float(last) * number
        tokens += number
    return total / tokens


@torch.no_grad()
def inner_held_out(recipe: RecursiveRecipe, system: System, tasks: Sequence[Task], texts: Texts) -> HeldOut:
    """The mean cosine, over agents, between what an inner link gives and the next token's embedding."""
    items: dict[str, float | None] = {}
    for task in tasks:
        cosines = []
        for name, agent in system.agents.items():
            prompts = inner_prompts(system, recipe, name, [task])
            cosines.append(1.0 - float(inner_loss(agent.backbone, agent.inner, prompts, texts.of(name, [task]))))
        items[task.id] = sum(cosines) / len(cosines)
    return HeldOut(items, {})


def inner_prompts(system: System, recipe: RecursiveRecipe, agent: str, tasks: Sequence[Task]) -> list[Prompt]:
    """What an inner link is trained behind: the role's prompt of round 1, its slots empty."""
    config = recipe.recursivemas
    text = config.prompt_of(agent, 1)
    prompts = []
    for task in tasks:
        runs = ids_around_slots(system.agents[agent].chat, config.system_of(agent), text, task, config.instruction)
        prompts.append(Prompt.of([i for run in runs for i in run]))
    return prompts


def refuse_long_tasks(recipe: RecursiveRecipe, system: System, tasks: Sequence[Task], key: str) -> None:
    """Raises `DataError` for a question that some agent's window does not hold, with the sizes.

    The questions with the most characters are counted token by token; were a shorter one longer in tokens, the step
    that takes it would end the run, naming the same sizes.
    """
    for task in sorted(tasks, key=lambda task: -len(task.question))[:_LONGEST]:
        why = too_long(system, recipe.recursivemas, task)
        if why is not None:
            raise DataError(
                f"{key}: question {task.id}: {why}", "drop or shorten it, or lower recursivemas.latent_steps"
            )
