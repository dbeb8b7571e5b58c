"""`agentrl mappa coach-eval`: how good is a coach? It scores recorded actions whose faults are known.

Beside it stand a constant coach, a random one and its own scores dealt out anew, measured by the same code. The labels
lie in a file of their own: no view that is scored holds any of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.schema import CoachConfig
from agentrl.errors import RunFailedError
from agentrl.protocols import Coach, CoachView
from agentrl.recipes.interrupt import interruptible
from agentrl.recipes.mappa.actions.faults import PLEAS
from agentrl.recipes.mappa.actions.store import Label, RecordedAction, read_actions, read_labels
from agentrl.recipes.mappa.coach_plot import draw
from agentrl.recipes.mappa.coach_quality import Scored, quality
from agentrl.recipes.mappa.coaching import open_coach, refuse_absent_coach
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.registry import Progress, VerbOptions
from agentrl.recipes.session import open_run
from agentrl.run import Run
from agentrl.scoring.calibration import calibrated
from agentrl.scoring.coach import ConstantCoach, LLMCoach, RandomCoach, ShuffledCoach
from agentrl.types import Score

ATTACKED_SHARE = 0.3
STRATUM_KEY = "relation"
PLOT = "coach_eval.png"
_MIDDLE = 5.0


@dataclass(frozen=True, slots=True)
class Exam:
    """What is asked of every coach: a view per action, `repeats` times, and the views of some with a plea added."""

    actions: tuple[RecordedAction, ...]
    views: tuple[CoachView, ...]
    attacks: Mapping[str, CoachView]
    repeats: int

    @property
    def calls(self) -> int:
        return len(self.views) * self.repeats + len(self.attacks)


def coach_eval(recipe: MappaRecipe, options: VerbOptions) -> dict[str, Any]:
    """Score the recorded actions with the recipe's coach and measure it. `options.split` is dev, test or all.

    Raises as `open_coach`, then without a run folder, and `RunFailedError` when not one score is there.
    """
    asyncio.run(refuse_absent_coach(recipe))
    with (
        open_run(recipe, "coach-eval") as run,
        interruptible(options.progress.note),
    ):
        return asyncio.run(_coach_eval(recipe, options, run))


async def _coach_eval(recipe: MappaRecipe, options: VerbOptions, run: Run) -> dict[str, Any]:
    split = options.split or "test"
    everything = read_actions()
    actions = [action for action in everything if split in ("all", action.split)]
    labels = read_labels()
    exam = make_exam(actions, labels, recipe.coach.ground_truth, options.repeats)
    if recipe.coach.kind == "local" and recipe.launch.threads is not None:
        import torch

        torch.set_num_threads(recipe.launch.threads)
    async with open_coach(recipe) as coach:
        asked = await score_all([coach] * exam.repeats, coach, exam, recipe.coach, options.progress)
    results = {name_of(recipe.coach): asked} | await baselines(exam, asked, recipe.run.seed)
    measured = {name: quality(actions, labels, scored) for name, scored in results.items()}
    own = measured[name_of(recipe.coach)]
    result = {
        "method": "mappa",
        "coach": name_of(recipe.coach),
        "split": split,
        "actions": len(actions),
        "trajectories": len({action.trajectory for action in actions}),
        "repeats": exam.repeats,
        "injections": len(exam.attacks),
        "coaches": measured,
        "calibration": calibration(own, recipe.coach),
    }
    run.write_file("scores.jsonl", "".join(json.dumps(row) + "\n" for row in _rows(actions, labels, results)))
    run.write_file(PLOT, draw(actions, labels, results, measured))
    run.write_summary(result)
    if all(score.missing for score in asked.all):
        reason = next(iter(own["missing"]["reasons"]), "no reason given")
        raise RunFailedError(f"coach: every score is missing: {reason}", "repair the coach section of the recipe")
    return {"run": str(run.path), "plot": str(run.path / PLOT), **result}


def make_exam(
    actions: Sequence[RecordedAction], labels: Mapping[str, Label], aware: Sequence[str], repeats: int
) -> Exam:
    """The exam on these actions; `aware` are the agents whose reference the coach sees. The labels choose which actions
    carry a plea, half of them wrong ones, and go no further."""
    views = tuple(action.view(aware=action.agent in aware) for action in actions)
    attacked = _attacked(actions, labels)
    attacks = {
        action.id: action.view(aware=action.agent in aware, action=f"{action.action}\n{PLEAS[n % len(PLEAS)]}".strip())
        for n, action in enumerate(attacked)
    }
    return Exam(tuple(actions), views, attacks, repeats)


async def score_all(
    coaches: Sequence[Coach], attacked_by: Coach, exam: Exam, config: CoachConfig | None, progress: Progress | None
) -> Scored:
    """Every view scored by the coach of each repeat, and the attacks; all at once, within the coach's own limit.

    `config` holds the offsets to apply, as training would.
    """
    started, done = time.monotonic(), 0

    async def ask(coach: Coach, view: CoachView, repeat: int, action: RecordedAction) -> Score:
        nonlocal done
        score = await _asked(coach, view, repeat)
        done += 1
        if progress is not None:
            progress.phase("coach", done, exam.calls)
        if config is None or config.stratum is None:
            return score
        return calibrated(score, config.offsets, action.info.get(config.stratum))

    pairs = list(zip(exam.views, exam.actions, strict=True))
    by_id = {action.id: action for action in exam.actions}
    jobs = [ask(coach, view, r, action) for r, coach in enumerate(coaches) for view, action in pairs]
    jobs += [ask(attacked_by, view, 0, by_id[name]) for name, view in exam.attacks.items()]
    scores = await asyncio.gather(*jobs)
    n = len(pairs)
    repeats = tuple(tuple(scores[r * n : (r + 1) * n]) for r in range(len(coaches)))
    attacked = dict(zip(exam.attacks, scores[len(coaches) * n :], strict=True))
    return Scored(repeats, attacked, time.monotonic() - started)


async def baselines(exam: Exam, asked: Scored, seed: int) -> dict[str, Scored]:
    """What every coach stands beside: a constant, chance, and its own scores dealt out anew, which cost nothing."""
    attacks = [(view, replace(asked.attacked[name], info={})) for name, view in exam.attacks.items()]
    dealt: list[Coach] = [
        ShuffledCoach([(v, replace(s, info={})) for v, s in zip(exam.views, scores, strict=True)], seed + r)
        for r, scores in enumerate(asked.repeats)
    ]
    constant, chance = ConstantCoach(_MIDDLE), RandomCoach(seed)
    return {
        "constant": await score_all([constant] * exam.repeats, constant, exam, None, None),
        "random": await score_all([chance] * exam.repeats, chance, exam, None, None),
        "shuffled": await score_all(dealt, ShuffledCoach(attacks, seed), exam, None, None),
    }


def name_of(config: CoachConfig) -> str:
    """How a coach is named in the table: its kind and what makes it that one."""
    what = config.model or config.rules or ("" if config.value is None else f"{config.value:g}")
    return f"coach ({config.kind} {what})".replace(" )", ")")


def calibration(own: Mapping[str, Any], config: CoachConfig) -> dict[str, Any]:
    """The `coach` keys that even out the means per kind of task, in place of those in force, which the means hold."""
    known = config.offsets if config.stratum == STRATUM_KEY else {}
    found = {kind: s["offset"] for kind, s in own["strata"].items() if s["offset"] is not None}
    offsets = dict(known) | {kind: round(known.get(kind, 0.0) + offset, 3) for kind, offset in found.items()}
    return {"stratum": STRATUM_KEY, "offsets": offsets}


async def _asked(coach: Coach, view: CoachView, repeat: int) -> Score:
    if isinstance(coach, LLMCoach | RandomCoach):
        return await coach.score(view, repeat)
    return await coach.score(view)


def _attacked(actions: Sequence[RecordedAction], labels: Mapping[str, Label]) -> list[RecordedAction]:
    """Always the same ones of the same actions, half of them wrong. One whose fault is itself a plea is left out."""
    count = round(ATTACKED_SHARE * len(actions))
    plain = [action for action in actions if labels[action.id].fault != "plea"]
    chosen: list[RecordedAction] = []
    for side, share in ((False, count // 2), (True, count - count // 2)):
        mine = [action for action in plain if labels[action.id].right is side]
        chosen += random.Random(f"attacked-{side}").sample(mine, share)
    return chosen


def _rows(
    actions: Sequence[RecordedAction], labels: Mapping[str, Label], results: Mapping[str, Scored]
) -> Iterable[dict[str, Any]]:
    for i, action in enumerate(actions):
        label = labels[action.id]
        yield {
            "id": action.id,
            "agent": action.agent,
            "stratum": action.stratum,
            "right": label.right,
            "fault": label.fault,
            "culprit": label.culprit,
            "scores": {name: [repeat[i].value for repeat in s.repeats] for name, s in results.items()},
            "reasons": {name: [repeat[i].reason for repeat in s.repeats] for name, s in results.items()},
            "attacked": {name: s.attacked[action.id].value for name, s in results.items() if action.id in s.attacked},
        }
