"""Strict and lenient scores stand side by side, and a missing one is missing."""

from __future__ import annotations

import asyncio

from agentrl.recipes.recursivemas.comparison import Measured, compare, strict_items
from agentrl.recipes.recursivemas.evaluate import held_out_tasks
from agentrl.types import Score, ScoredTrajectory, Task, Trajectory


def _scored(task: Task, values, answers=None) -> list[ScoredTrajectory]:
    return [
        ScoredTrajectory(Trajectory(f"{task.id}/{g}", task, g, (), (answers or {}).get(g), "ok"), Score(v), ())
        for g, v in enumerate(values)
    ]


def test_pass_at_k_of_missing_scores_is_missing_unless_one_is_right():
    a, b, c = (Task(i, "?", ("x",)) for i in "abc")
    scored = [*_scored(a, [0.0, 1.0]), *_scored(b, [0.0, None]), *_scored(c, [None, 1.0])]
    assert strict_items(scored) == {"a": 1.0, "b": None, "c": 1.0}


def test_t28_both_measures_stand_side_by_side(make_held_out):
    rows = [("a", "How many?", "1/3"), ("b", "And now?", "2.9"), ("c", "Then?", "7")]
    recipe = make_held_out(answer="boxed", rows=rows)
    tasks = held_out_tasks(recipe)
    texts = {"a": r"\boxed{1/2}", "b": r"\boxed{2.1}", "c": r"\boxed{7}"}
    measured = _graded_as(recipe, tasks, texts)
    row = compare(recipe, [measured])["ring"]
    assert row["strict"]["items"] == {"a": 0.0, "b": 0.0, "c": 1.0}
    assert row["lenient"]["items"] == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_t28_an_unparsable_choice_counts_as_a_in_lenient_alone(make_held_out):
    rows = [("a", "Which?\nA. x\nB. y", "A"), ("b", "Which one?\nA. x\nB. y", "B")]
    recipe = make_held_out(answer="choice", rows=rows)
    measured = _graded_as(recipe, held_out_tasks(recipe), {"a": "I do not know", "b": "No idea"})
    row = compare(recipe, [measured])["ring"]
    assert row["strict"]["items"] == {"a": 0.0, "b": 0.0}
    assert row["lenient"]["items"] == {"a": 1.0, "b": 0.0}


def _graded_as(recipe, tasks, texts) -> Measured:
    """What the decoder is taken to have written, read and graded by the real parts."""
    from agentrl.recipes.recursivemas.held_out import grade
    from agentrl.recipes.recursivemas.infer import Answered, trajectories
    from agentrl.recipes.recursivemas.tool_loop import Said
    from agentrl.recipes.rewards import open_reward
    from agentrl.types import Action, Completion, Key, Prompt, Request, Sampling

    completion = Completion((1,), (0.0,), (False,), (False,), "stop", 0)
    asked = {t.id: Request("p", Prompt.of([1]), Sampling(), Key("eval", 0, t.id, 0, 1, 2)) for t in tasks}
    said = tuple(Said((Action("solver", asked[t.id], completion, texts[t.id]),)) for t in tasks)
    batch = Answered(tuple(tasks), (said,), (), 0.0, 0.0, 0)

    async def run():
        async with open_reward(recipe.grader) as reward:
            return await grade(reward, trajectories(recipe, batch))

    return Measured("ring", (batch,), tuple(asyncio.run(run())), 0.0)
