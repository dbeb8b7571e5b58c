"""Record the actions that `coach-eval` scores: real rollouts of two small teams, some with a fault put into an agent.

    python -m agentrl.recipes.mappa.actions.record FOLDER --reading RUN [--seed N]

RUN is a finished `agentrl mappa train recipes/smoke/mappa.yaml`. Every question is rolled out greedily; those whose
every action is right are rolled out again with one agent's completion replaced (`faults.py`), while its tools run and
the later agents act for real. Some are kept as they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.config.shipped import shipped_folder
from agentrl.protocols import Engine, WeightSource
from agentrl.recipes.collect import collect, jobs_for
from agentrl.recipes.mappa.actions.faults import Scene, faults_of, inject
from agentrl.recipes.mappa.actions.sound import sound
from agentrl.recipes.mappa.actions.store import Label, RecordedAction, write
from agentrl.recipes.mappa.coaching import files_shown
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.setup import NoOutcome, eval_tasks, make_workflow, window
from agentrl.recipes.mappa.workflow import Acted
from agentrl.recipes.registry import load_recipe
from agentrl.recipes.session import Session, open_session
from agentrl.types import Completion, FinishReason, Request, Task
from agentrl.versions import git_commit

_FAULTY_SHARE = 0.75
_TEST = {"reading": 20, "computing": 20}  # trajectories: 20 of three actions and 20 of two are 100 actions
_DEV = {"reading": 30, "computing": 30}
Plan = Mapping[str, tuple[int, str]]
"""Task id -> (agent's place, fault)."""


@dataclass(slots=True)
class FaultyEngine:
    """An engine that says something else where the plan asks for a fault."""

    engine: Engine
    plan: Plan
    recipe: MappaRecipe
    session: Session
    tasks: Mapping[str, Task]
    seed: int

    async def generate(self, request: Request) -> Completion:
        done = await self.engine.generate(request)
        place, fault = self.plan.get(request.key.task, (None, ""))
        if request.key.agent != place:
            return done
        name = list(self.recipe.agents)[request.key.agent]
        chat = self.session.formats[request.policy]
        handed = handed_in(chat.decode(request.prompt.ids))
        scene = Scene(self.tasks[request.key.task], name, handed, chat.decode_completion(done.ids))
        ids = chat.encode_world(inject(fault, scene, str(self.seed)))
        ended = fault != "truncated"
        ids = (*ids, *chat.eos_ids[:1]) if ended else ids or chat.eos_ids[:1]
        flags = (False,) * len(ids)
        reason: FinishReason = "stop" if ended else "length"
        return replace(done, ids=ids, logprobs=(0.0,) * len(ids), constrained=flags, forced=flags, finish_reason=reason)

    async def load_weights(self, policy: str, version: int, source: WeightSource) -> int:
        return await self.engine.load_weights(policy, version, source)

    async def close(self) -> None:
        await self.engine.close()


def handed_in(observed: str) -> str:
    """What an agent was handed: the last user turn of its prompt, without the line that says from whom."""
    user = observed.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    head, _, rest = user.partition("\n")
    return rest if head.startswith("From ") else user


def computing_tasks(seed: int, n: int) -> list[Task]:
    """`n` questions that a short program answers: sums, products, lengths of words, as many of each."""
    words = (
        "basket bicycle blanket candle compass crown guitar hammer jacket kettle ladder lantern mirror needle pencil"
    )
    words += " piano pillow scarf shovel spoon trumpet violin wagon whistle penguin rabbit salmon turtle hedgehog"
    rng, tasks, seen = random.Random(f"computing-{seed}"), list[Task](), set[str]()
    assert n <= 3 * len(words.split()), "there are not so many words"
    while len(tasks) < n:
        kind = ("sum", "product", "letters")[len(tasks) % 3]
        one, two = rng.randint(11, 89), rng.randint(3, 48)
        word = rng.choice(words.split())
        question, answer = {
            "sum": (f"What is {one} plus {two}?", one + two),
            "product": (f"What is {one} times {two}?", one * two),
            "letters": (f'How many letters does "{word}" have?', len(word)),
        }[kind]
        if question not in seen:
            seen.add(question)
            tasks.append(Task(f"computing-{len(tasks):03d}", question, (str(answer),), info={"relation": kind}))
    return tasks


def planned(tasks: Sequence[Task], agents: Sequence[str], seed: int) -> dict[str, tuple[int, str]]:
    """Which of the tasks get which fault in which agent: agents in turn, and the faults of each in turn."""
    rng = random.Random(f"plan-{seed}")
    faulty = rng.sample([task.id for task in tasks], round(_FAULTY_SHARE * len(tasks)))
    turns = dict.fromkeys(agents, 0)
    plan = {}
    for number, task in enumerate(faulty):
        place = number % len(agents)
        names = faults_of(agents[place])
        plan[task] = (place, names[turns[agents[place]] % len(names)])
        turns[agents[place]] += 1
    return plan


async def record_team(
    team: str, recipe: MappaRecipe, tasks: Sequence[Task], seed: int
) -> list[tuple[RecordedAction, Label]]:
    """The actions of one team with their labels, split by split."""
    agents = list(recipe.agents)
    async with open_session(recipe, seed=seed, window=window(recipe)) as session:
        clean = await _roll(recipe, session, tasks, 0)
        whole = [t for t in tasks if len(clean[t.id]) == len(agents) and all(_right(a) for a in clean[t.id])]
        wanted = _DEV[team] + _TEST[team]
        kept = _balanced(whole, wanted)
        sides = {"test": kept[: _TEST[team]], "dev": kept[_TEST[team] :]}
        plan = {k: v for side, chosen in sides.items() for k, v in planned(chosen, agents, seed + len(side)).items()}
        engine = FaultyEngine(session.engine, plan, recipe, session, {t.id: t for t in kept}, seed)
        acted = await _roll(recipe, replace(session, engine=engine), [t for t in kept if t.id in plan], 1)
    rows = []
    for side, chosen in sides.items():
        for number, task in enumerate(chosen):
            fault = plan.get(task.id)
            rows += _rows(f"{team}-{side}-{number:02d}", side, recipe, (acted if fault else clean)[task.id], fault)
    return rows


async def _roll(recipe: MappaRecipe, session: Session, tasks: Sequence[Task], g: int) -> dict[str, list[Acted]]:
    heard: dict[str, list[Acted]] = {task.id: [] for task in tasks}
    workflow = make_workflow(recipe, session, 0.0, lambda acted: heard[acted.task.id].append(acted))
    jobs = [replace(job, g=g) for job in jobs_for(tasks, 1, "record", 1)]
    done = await collect(session, jobs, workflow, NoOutcome(), max_concurrent=len(jobs))
    for one in done.scored:
        if one.trajectory.status == "failed":
            raise RuntimeError(f"{one.trajectory.id}: {one.trajectory.status_reason}")
    return {task: sorted(found, key=lambda acted: acted.turn.order) for task, found in heard.items()}


def _scene(acted: Acted) -> Scene:
    return Scene(acted.task, acted.turn.action.agent, handed_in(acted.observed), acted.turn.action.text)


def _right(acted: Acted) -> bool:
    seen = acted.turn.observation
    saved = not acted.ledger.view(acted.turn.action.agent)["missing"]
    return sound(_scene(acted), None if seen is None else seen.text, saved)


def _balanced(tasks: Sequence[Task], n: int) -> list[Task]:
    """`n` of the tasks, the kinds of question in turn. Raises `ValueError` when there are not so many."""
    kinds: dict[str, list[Task]] = {}
    for task in tasks:
        kinds.setdefault(task.info["relation"], []).append(task)
    chosen: list[Task] = []
    while len(chosen) < n:
        left = [kinds[kind] for kind in sorted(kinds) if kinds[kind]]
        if not left:
            raise ValueError(f"only {len(chosen)} of {n} trajectories are wholly right")
        chosen += [tasks.pop(0) for tasks in left]
    return chosen[:n]


def _rows(
    name: str, side: Any, recipe: MappaRecipe, acted: Iterable[Acted], fault: tuple[int, str] | None
) -> list[tuple[RecordedAction, Label]]:
    rows = []
    agents = list(recipe.agents)
    culprit = None if fault is None else agents[fault[0]]
    for place, one in enumerate(acted):
        agent, task, seen = one.turn.action.agent, one.task, one.turn.observation
        action = RecordedAction(
            id=f"{name}-{place}",
            trajectory=name,
            split=side,
            stratum=task.info["relation"],
            task_id=task.id,
            question=task.question,
            reference=task.references[0],
            info=task.info,
            agent=agent,
            role=recipe.agents[agent].role,
            observed=one.observed,
            action=one.turn.action.text,
            feedback=None if seen is None else seen.text,
            ledger=files_shown(one.ledger, agent),
        )
        mine = fault[1] if fault is not None and agent == culprit else None
        rows.append((action, Label(action.id, mine is None and _right(one), mine, culprit)))
    return rows


async def record(folder: Path, reading: str, seed: int) -> Counter[str]:
    """Record both teams into `folder`; returns what was recorded, counted."""
    read = load_recipe(str(shipped_folder() / "smoke" / "mappa.yaml")).tree
    assert isinstance(read, MappaRecipe)
    policies = {n: m.model_copy(update={"checkpoint": reading}) for n, m in read.policies.items()}
    compute = load_recipe(str(Path(__file__).with_name("computing.yaml"))).tree
    assert isinstance(compute, MappaRecipe)
    rows = await record_team("reading", read.model_copy(update={"policies": policies}), eval_tasks(read), seed)
    rows += await record_team("computing", compute, computing_tasks(seed, 84), seed)
    about = {
        "commands": [
            f"agentrl mappa train recipes/smoke/mappa.yaml --seed {seed} --name TRAINED",
            f"python -m agentrl.recipes.mappa.actions.record FOLDER --reading TRAINED --seed {seed}",
        ],
        "commit": git_commit(),
        "trained_at_commit": json.loads((Path(reading) / "summary.json").read_text())["git_commit"],
        "model": "smollm2-135m, engine hf; the reading team trained for 15 steps, the computing team as it is",
        "seed": seed,
        "actions": len(rows),
    }
    rows.sort(key=lambda row: (row[0].split != "test", row[0].id))
    write(folder, [action for action, _ in rows], [label for _, label in rows], about)
    counts = Counter(f"{a.split} {'right' if label.right else 'wrong'}" for a, label in rows)
    return counts + Counter(f"{a.split} fault {label.fault}" for a, label in rows if label.fault)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m agentrl.recipes.mappa.actions.record")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reading", required=True, metavar="RUN", help="a finished run of recipes/smoke/mappa.yaml")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, count in sorted(asyncio.run(record(given.folder, given.reading, given.seed)).items()):
        sys.stdout.write(f"{name}: {count}\n")


if __name__ == "__main__":
    main()
