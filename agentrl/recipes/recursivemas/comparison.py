"""What an evaluation says of the ring and of each control: scores by two measures, what it cost, and how it compares.

Costs are kept apart: text tokens sampled, latent steps, prompt positions read, and forward positions computed (padding
not counted). The paper's token counts are decoded text alone; both reductions are given here.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, its tables of tokens and time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.grading.interval import eval_block, paired_rise
from agentrl.grading.lenient import has_leniency, lenient_score
from agentrl.grading.qa import f1
from agentrl.grading.trials import trials_block
from agentrl.recipes.recursivemas.infer import Answered
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import Stage
from agentrl.recipes.recursivemas.text_team import TextStage
from agentrl.types import ScoredTrajectory

RING = "ring"
NOT_REPRODUCED = (
    "single agent with LoRA",
    "single agent with full fine-tuning",
    "Mixture-of-Agents",
    "TextGrad",
    "LoopLM (Ouro-2.6B)",
)

Items = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the comparison: batches as answered, their graded trajectories, and the wall seconds of the answers
    (loading, warm-up and grading left out)."""

    name: str
    batches: tuple[Answered, ...]
    scored: tuple[ScoredTrajectory, ...]
    wall_s: float


def compare(recipe: RecursiveRecipe, measured: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Row name -> its block; the first row is the ring, which the others are compared with, question by question."""
    ring, rows = strict_items(measured[0].scored), {}
    for one in measured:
        items = strict_items(one.scored)
        block = {"strict": eval_block(items), **_other_measures(recipe, one.scored)}
        if one is not measured[0]:
            block["difference"] = paired_rise(ring, items, seed=recipe.run.seed)
        rows[one.name] = {**block, **costs(one), "seconds": seconds(one)}
    return rows


def strict_items(scored: Sequence[ScoredTrajectory]) -> dict[str, float | None]:
    """Task -> the best score among its answers (pass@k); None where none is right and one could not be graded."""
    by_task = _by_task(scored, [one.outcome.value for one in scored])
    return {name: _best(values) for name, values in by_task.items()}


def _other_measures(recipe: RecursiveRecipe, scored: Sequence[ScoredTrajectory]) -> dict[str, Any]:
    """The released evaluation's leniency, F1 beside exact match, and with several answers the mean over all."""
    out: dict[str, Any] = {}
    kind = recipe.recursivemas.answer
    if recipe.reward is None and has_leniency(kind):
        values = [
            lenient_score(kind, s.outcome.value, s.trajectory.answer, _text(s), s.trajectory.task.references)
            for s in scored
        ]
        out["lenient"] = eval_block({name: _best(found) for name, found in _by_task(scored, values).items()})
    if recipe.grader == "exact_match":
        words = [_f1(s) for s in scored]
        out["f1"] = eval_block({name: _best(found) for name, found in _by_task(scored, words).items()})
    if recipe.recursivemas.decodes > 1:
        trials = trials_block(_by_task(scored, [one.outcome.value for one in scored]))
        out["mean_of_answers"] = {key: trials[key] for key in ("score", "se", "n", "trials", "missing")}
    return out


def costs(measured: Measured) -> dict[str, float]:
    """Per question: text tokens, latent steps, prompt positions and forward positions computed; for text teams also
    the mean length of a message, and how much of all messages did not fit a window."""
    counts = [one.trajectory.counts for one in measured.scored]
    questions = sum(len(batch.tasks) for batch in measured.batches)

    def total(key: str) -> float:
        return sum(count.get(key, 0) for count in counts)

    out = {f"{key}_per_question": total(key) / questions for key in ("text_tokens", "latent_steps", "prompt_positions")}
    out["positions_per_question"] = positions(measured.batches) / questions
    if total("messages"):
        out["tokens_per_message"] = total("message_tokens") / total("messages")
        out["messages_per_question"] = total("messages") / questions
        out["cut_message_tokens"] = total("cut_tokens")
    return out


def positions(batches: Sequence[Answered]) -> int:
    """Forward positions that all models computed, as counted where they were computed."""
    latent = sum(action.positions for b in batches for stage in b.stages for action in stage.actions)
    written = sum(computed for b in batches for stage in b.written for computed in stage.computed)
    return latent + written + sum(b.decoded_positions for b in batches)


def seconds(measured: Measured) -> dict[str, Any]:
    """Wall seconds by stage, in the order of the rounds; `decode` includes the making of its prompts. `wall` was
    measured around all of it."""
    stages: dict[str, float] = {}
    for batch in measured.batches:
        timed: tuple[Stage | TextStage, ...] = (*batch.stages, *batch.written)
        for stage in timed:
            name = f"round {stage.round}, {stage.agent}"
            stages[name] = stages.get(name, 0.0) + stage.seconds
    return {
        "stages": {name: round(value, 4) for name, value in stages.items()},
        "decode": round(sum(batch.decoding_s for batch in measured.batches), 4),
        "wall": round(measured.wall_s, 4),
    }


def reductions(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    """How much less the ring writes than the text team (0.6: 60% less), by text alone and with its latent steps
    counted as tokens, and how many times as long the text team takes. None without a text team."""
    if "text" not in rows:
        return None
    ring, team = rows[RING], rows["text"]
    text, latents = ring["text_tokens_per_question"], ring["latent_steps_per_question"]
    return {
        "text_tokens": 1 - text / team["text_tokens_per_question"],
        "text_tokens_and_latent_steps": 1 - (text + latents) / team["text_tokens_per_question"],
        "times_faster": team["seconds"]["wall"] / ring["seconds"]["wall"],
    }


def _by_task(scored: Sequence[ScoredTrajectory], values: Sequence[float | None]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for one, value in zip(scored, values, strict=True):
        found.setdefault(one.trajectory.task.id, []).append(value)
    return found


def _best(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known or (max(known) < 1.0 and len(known) < len(values)):
        return None
    return max(known)


def _text(scored: ScoredTrajectory) -> str:
    """What the decoder wrote in the last round, around its calls of tools."""
    turns = scored.trajectory.turns
    last = (turns[-1].turn, turns[-1].agent_index)
    return "".join(turn.action.text for turn in turns if (turn.turn, turn.agent_index) == last)


def _f1(scored: ScoredTrajectory) -> float | None:
    if scored.outcome.value is None:
        return None
    return 0.0 if scored.trajectory.answer is None else f1(scored.trajectory.answer, scored.trajectory.task.references)
