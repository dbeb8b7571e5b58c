"""What a training run measures on held-out questions: answers where they are decoded, and losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentrl.grading.interval import paired_rise
from agentrl.protocols import Reward
from agentrl.recipes.records import untrained_records
from agentrl.recipes.recursivemas.decode import Decoder
from agentrl.recipes.recursivemas.infer import Answered, answer_tasks, trajectories
from agentrl.recipes.recursivemas.losses import inner_loss, outer_loss
from agentrl.recipes.recursivemas.prompts import ids_around_slots
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import System
from agentrl.recipes.recursivemas.setup import Loaded
from agentrl.recipes.recursivemas.texts import Ids, Texts, known_text
from agentrl.recipes.registry import Progress
from agentrl.rollout.latent_answer import text_logprobs, text_states
from agentrl.run import Run
from agentrl.types import Prompt, Score, ScoredTrajectory, Task


@dataclass(frozen=True, slots=True)
class HeldOut:
    """`items`: each task's score (1.0 right; stage inner: mean cosine of its agents' links), None where it is missing.
    `losses`: mean cross-entropy of the answers' tokens, `as_used` after the recursion as it is used, None where no
    question has an answer as text; for the leak probe see `probe_losses`."""

    items: Mapping[str, float | None]
    losses: Mapping[str, float | None]


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
    losses: dict[str, float | None] = {"as_used": used_loss(loaded.system, batches, texts)}
    if recipe.recursivemas.train.leak_probe:
        losses |= probe_losses(recipe, loaded.system, batches, texts)
    return HeldOut({one.trajectory.task.id: one.outcome.value for one in scored}, losses)


def used_loss(system: System, batches: Sequence[Answered], texts: Texts) -> float | None:
    """Mean cross-entropy per answer token after the prompts that the decoder answered from; None without answers."""
    return _per_token(used_nats(system, batches, texts.answers), texts.answers)


@torch.no_grad()
def used_nats(system: System, batches: Sequence[Answered], answers: Mapping[str, Ids]) -> dict[str, float]:
    """Task -> the cross-entropy of its answer, summed over tokens. Questions without an answer are left out."""
    backbone = system.agents[system.graph.decoder].backbone
    nats: dict[str, float] = {}
    for batch in batches:
        prompts = {
            task.id: action.request.prompt
            for task, action in zip(batch.tasks, batch.actions, strict=True)
            if task.id in answers
        }
        if prompts:
            states = text_states(backbone, list(prompts.values()), [answers[name] for name in prompts])
            sums = (-text_logprobs(backbone, states).sum(dim=-1)).tolist()
            nats |= dict(zip(prompts, sums, strict=True))
    return nats


@torch.no_grad()
def probe_losses(
    recipe: RecursiveRecipe, system: System, batches: Sequence[Answered], texts: Texts
) -> dict[str, float | None]:
    """The leak probe (T19): answers are drawn at random, so nothing but a leak can tell a question's own answer from
    another's. In the form of training: `as_trained` on its own answer, `other` on the next question's, and the paired
    95% interval of the difference per token (`gap`, `gap_low`, `gap_high`) over `pairs` questions: those that drew
    another answer than the next one did. Without any the figures of the difference are None."""
    tasks = [task for batch in batches for task in batch.tasks]
    own = {task.id: texts.answers[task.id] for task in tasks}
    other = {
        task.id: texts.answers[following.id]
        for task, following in zip(tasks, [*tasks[1:], tasks[0]], strict=True)
        if texts.answers[following.id] != own[task.id]
    }
    if recipe.recursivemas.train.form == "teacher_forced":
        found = [_read_nats(recipe, system, tasks, texts, scored) for scored in (own, other)]
    else:
        found = [used_nats(system, batches, scored) for scored in (own, other)]
    per_token = [
        {name: n / len(scored[name]) for name, n in nats.items()}
        for nats, scored in zip(found, (own, other), strict=True)
    ]
    gap = paired_rise(per_token[0], per_token[1])
    told = {"gap": gap["value"], "gap_low": gap["low"], "gap_high": gap["high"], "pairs": gap["n"]}
    return {"as_trained": _per_token(found[0], own), "other": _per_token(found[1], other), **told}


def _read_nats(
    recipe: RecursiveRecipe, system: System, tasks: Sequence[Task], texts: Texts, scored: Mapping[str, Ids]
) -> dict[str, float]:
    """The same after a recursion in which every agent reads its known text, one question at a time."""
    nats = {}
    for task in tasks:
        if task.id not in scored:
            continue
        answer = scored[task.id]
        known = {agent: texts.of(agent, [task]) for agent in system.graph.agents}
        read = texts.answers_of([task])
        out = outer_loss(system, recipe.recursivemas, [task], read, form="teacher_forced", texts=known, scored=[answer])
        nats[task.id] = float(out.loss) * len(answer)
    return nats


def _per_token(nats: Mapping[str, float], answers: Mapping[str, Ids]) -> float | None:
    return sum(nats.values()) / sum(len(answers[name]) for name in nats) if nats else None


@torch.no_grad()
def inner_held_out(recipe: RecursiveRecipe, system: System, tasks: Sequence[Task], texts: Texts) -> HeldOut:
    """The mean cosine, over agents, between what an inner link gives and the next token's embedding; None for a task
    without an answer as text, which the decoder would say."""
    items: dict[str, float | None] = dict.fromkeys(task.id for task in tasks)
    for task in tasks:
        if not task.references:
            continue
        cosines = []
        for name, agent in system.agents.items():
            prompts = inner_prompts(system, recipe, name, [task], texts)
            cosines.append(1.0 - float(inner_loss(agent.backbone, agent.inner, prompts, texts.of(name, [task]))))
        items[task.id] = sum(cosines) / len(cosines)
    return HeldOut(items, {})


def inner_prompts(
    system: System, recipe: RecursiveRecipe, agent: str, tasks: Sequence[Task], texts: Texts
) -> list[Prompt]:
    """What an inner link is trained behind: the role's prompt of round 1, its slots empty or with what their agents'
    known texts say."""
    config, chat = recipe.recursivemas, system.agents[agent].chat
    text, slots = config.prompt_of(agent, 1), config.slots_of(agent, 1)
    prompts = []
    for task in tasks:
        runs = ids_around_slots(chat, config.system_of(agent), text, task, config.instruction)
        ids = list(runs[0])
        for source, run in zip(slots, runs[1:], strict=True):
            if config.train.inner_slots == "text":
                ids += chat.format.encode_world(known_text(config, texts.sources[source], task))
            ids += run
        prompts.append(Prompt.of(ids))
    return prompts
