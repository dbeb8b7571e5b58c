"""The rule of the embedded reading team: what each agent earns, and that a broken input is not its fault."""

from __future__ import annotations

import pytest

from agentrl.config.schema import DatasetConfig
from agentrl.data import load_tasks
from agentrl.protocols import CoachView
from agentrl.recipes.mappa.reading import reading
from agentrl.types import Task

TASK = Task("q", "...", ("Dresden",), info={"sentence": "The wild pony lives in Dresden."})


def score(agent: str, action: str, received: str = "") -> float:
    observed = f"<|im_start|>user\nFrom x:\nOslo<|im_end|>\n<|im_start|>user\nFrom other:\n{received}<|im_end|>\n"
    return reading(CoachView(TASK, agent, "a role", observed, action, None, {}, "Dresden"))[0]


@pytest.mark.parametrize(
    ("agent", "action", "received", "expected"),
    [
        ("reader", "The wild pony lives in Dresden.", "", 10.0),
        ("reader", "The wild pony eats chalk.", "", 4.44),
        ("reader", "", "", 0.0),
        ("answerer", "Dresden", "It lives in Dresden.", 10.0),
        ("answerer", "It lives in Dresden", "It lives in Dresden.", 4.0),
        ("answerer", "Oslo", "It lives in Dresden.", 0.0),
        ("answerer", "Perth", "It lives in Perth.", 6.0),
        ("answerer", "Oslo", "It lives in Perth.", 2.0),
        ("speaker", "<answer>Dresden</answer>", "Dresden", 10.0),
        ("speaker", "so: <answer>Dresden</answer>", "Dresden", 7.5),
        ("speaker", "Dresden", "Dresden", 5.0),
        ("speaker", "<answer>Perth</answer>", "Perth", 10.0),
        ("speaker", "<answer>Dresden</answer>", "Perth", 5.0),
    ],
)
def test_m08_each_agent_is_scored_on_its_own_part(agent, action, received, expected):
    assert score(agent, action, received) == expected


def test_a_rule_that_is_told_no_reference_says_so():
    with pytest.raises(ValueError, match="ground_truth"):
        reading(CoachView(TASK, "reader", "r", "o", "a", None))


def test_the_embedded_pages_hold_the_answer_and_share_no_animal():
    train, held = (load_tasks(DatasetConfig(path="invented-pages", split=s, limit=50)) for s in ("train", "eval"))
    assert train == load_tasks(DatasetConfig(path="invented-pages", split="train", limit=50))
    for task in (*train, *held):
        facts, question = task.question.split("\n")
        assert task.info["sentence"] in facts
        assert task.references[0] in task.info["sentence"]
        assert task.info["animal"] in question
        assert facts.count(".") == 4
    assert not {t.info["animal"] for t in train} & {t.info["animal"] for t in held}
