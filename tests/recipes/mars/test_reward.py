"""One reward at the end of a trajectory (the local part of spec E1)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from agentrl.errors import ConfigError, RunFailedError
from agentrl.recipes.collect import collect, jobs_for, refuse_ungraded
from agentrl.recipes.mars.credit import assign
from agentrl.recipes.mars.reward import open_reward
from agentrl.recipes.session import Session
from agentrl.rollout.gate import Gate
from agentrl.types import MaskReason, Score, Task, Trajectory

TASK = Task("q", "Where?", ("north", "the North"))


def trajectory(answer, status="ok", task=TASK) -> Trajectory:
    return Trajectory("t", task, 0, (), answer, status)


def score(recipe, t) -> Score:
    async def main() -> Score:
        async with open_reward(recipe, lambda _: None) as reward:
            return await reward.score(t.task, t)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "status", "value"),
    [
        ("north", "ok", 1.0),
        ("The North.", "ok", 1.0),
        ("south", "ok", 0.0),
        ("north or south", "ok", 0.0),
        ("", "ok", 0.0),
        (None, "ok", 0.0),
        (None, "truncated", 0.0),
        (None, "turn_limit", 0.0),
        (None, "failed", None),
    ],
)
def test_e1_the_reward_is_0_or_1_and_a_missing_answer_is_a_true_0(lab, answer, status, value):
    assert score(lab.recipe(), trajectory(answer, status)).value == value


def test_e1_a_task_without_reference_has_no_reward_whatever_the_answer(lab):
    bare = Task("q", "Where?", ())
    for answer in ("north", None):
        assert score(lab.recipe(), trajectory(answer, task=bare)).missing


def test_f1_may_be_named_instead_and_an_unknown_reward_is_refused(lab):
    assert 0 < score(lab.recipe(reward="f1"), trajectory("north pole")).value < 1
    with pytest.raises(ConfigError, match="reward"):
        score(lab.recipe(reward="no_such_module_here:grade"), trajectory("north"))


class Grader:
    """Fails for some rollouts, in the ways graders fail."""

    calls = 0

    def __init__(self, how):
        self.how = how

    async def score(self, task, trajectory):
        Grader.calls += 1
        if trajectory.g % 2:
            return Score(1.0)
        if self.how == "raises":
            raise RuntimeError("the grader is down")
        return Score(float(self.how))


@pytest.mark.parametrize("how", ["raises", "nan", "inf"])
def test_e1_a_grader_that_fails_gives_missing_scores_whose_tokens_are_masked(roll, lab, how):
    out = roll(lab.script([lab.call(), lab.ANSWER]), [lab.page_tool("page")], group_size=4)
    by_id = {t.id: t for t in out.trajectories}

    class Replay:
        async def run(self, task, ctx):
            return by_id[ctx.trajectory_id]

    session = Session(None, {}, None, Gate(), {}, {})
    Grader.calls = 0
    jobs = jobs_for([lab.QUESTION], 4, "train", 1)
    collected = asyncio.run(collect(session, jobs, Replay(), Grader(how), max_concurrent=4))
    assert Grader.calls == 4  # one call per trajectory
    assert [s.outcome.value for s in collected.scored] == [None, 1.0, None, 1.0]
    assert all(s.outcome.reason for s in collected.scored if s.outcome.missing)
    samples = [x for s in collected.scored for x in lab.samples(s.trajectory, s.outcome.value)]
    lost = [s for s in samples if s.score.missing]
    assert len(lost) == 4
    for one in lost:
        assert {one.reasons[t] for span in one.spans for t in range(span.start, span.stop)} == {
            MaskReason.REWARD_MISSING
        }
    assert all(
        set(c.weights) == {0.0} for c in assign(samples, out.recipe.mars, seed=0, step=1).credited if c.sample in lost
    )


def ended(outcome: Score, *actions: Score | None, status: str = "done") -> SimpleNamespace:
    return SimpleNamespace(trajectory=SimpleNamespace(status=status), outcome=outcome, action_scores=actions)


def test_a_step_whose_every_reward_is_missing_is_refused_with_the_first_reason():
    lost, found, failed = Score(None, "no route"), Score(0.0), ended(Score(None, "rollout failed: x"), status="failed")
    refuse_ungraded(3, "reward", [])
    refuse_ungraded(3, "reward", [failed, failed])  # rollouts that failed say nothing about the grader
    refuse_ungraded(3, "reward", [ended(lost), ended(found)])
    with pytest.raises(RunFailedError, match="reward: every reward of step 3 is missing: no route"):
        refuse_ungraded(3, "reward", [failed, ended(lost), ended(Score(None, "later"))])
    refuse_ungraded(3, "coach", [ended(lost, None), ended(lost, lost, found)], actions=True)
    with pytest.raises(RunFailedError, match="coach: every reward of step 3 is missing: no route"):
        refuse_ungraded(3, "coach", [ended(found, None, lost)], actions=True)
