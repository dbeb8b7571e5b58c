"""The recorded actions: enough of them, two fixed splits, labels apart; and the injector that spoilt some of them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from agentrl.errors import DataError
from agentrl.recipes.mappa.actions.faults import FAULTS, Scene, faults_of, inject
from agentrl.recipes.mappa.actions.record import computing_tasks, handed_in, planned
from agentrl.recipes.mappa.actions.sound import sound
from agentrl.recipes.mappa.actions.store import (
    ACTIONS,
    FOLDER,
    LABELS,
    Label,
    RecordedAction,
    read_actions,
    read_labels,
    write,
)
from agentrl.types import Task

READING = Task(
    "t",
    "The shy cat eats figs. The shy dog lives in Rome. The shy cat owns a bell.\nWhat does the shy cat own?",
    ("bell",),
    info={"sentence": "The shy cat owns a bell.", "relation": "tool"},
)
ADDING = Task("c", "What is 3 plus 4?", ("7",), info={"relation": "sum"})
PROGRAM = "```python\nanswer = 3 + 4\nprint(answer)\nopen('result.txt', 'w').write(str(answer))\n```"
SCENES = {
    "reader": Scene(READING, "reader", READING.question, "The shy cat owns a bell."),
    "answerer": Scene(READING, "answerer", "The shy cat owns a bell.", "bell"),
    "speaker": Scene(READING, "speaker", "bell", "<answer>bell</answer>"),
    "coder": Scene(ADDING, "coder", ADDING.question, PROGRAM),
    "reporter": Scene(ADDING, "reporter", "7", "<answer>7</answer>"),
}


def test_there_are_two_hundred_actions_and_a_test_split_of_exactly_a_hundred():
    actions = read_actions()
    assert len(actions) >= 200
    assert len(read_actions(split="test")) == 100
    sides = Counter((a.trajectory, a.split) for a in actions)
    assert len(sides) == len({a.trajectory for a in actions}), "a trajectory lies in one split"
    assert {a.task_id for a in read_actions(split="test")}.isdisjoint(a.task_id for a in read_actions(split="dev"))
    assert len({a.stratum for a in actions}) >= 2
    assert sum((FOLDER / name).stat().st_size for name in (ACTIONS, LABELS)) < 1_000_000


def test_every_action_has_one_label_and_every_fault_a_culprit_of_its_own_trajectory():
    actions, labels = read_actions(), read_labels()
    assert {a.id for a in actions} == set(labels)
    for action in actions:
        label = labels[action.id]
        assert label.fault is None or (not label.right and label.culprit == action.agent)
    for name in {a.trajectory for a in actions}:
        mine = [labels[a.id] for a in actions if a.trajectory == name]
        assert len({label.culprit for label in mine}) == 1
        assert sum(label.fault is not None for label in mine) == (mine[0].culprit is not None)
    wrong = Counter(labels[a.id].right for a in read_actions(split="test"))
    assert min(wrong.values()) >= 30
    assert {label.fault for label in labels.values()} == {None, *FAULTS}


def test_what_is_labelled_right_follows_from_the_rules_alone():
    labels = read_labels()
    for action in read_actions():
        task = Task(action.task_id, action.question, (action.reference,), info=dict(action.info))
        scene = Scene(task, action.agent, handed_in(action.observed), action.action)
        good = sound(scene, action.feedback, not action.ledger.get("missing"))
        label = labels[action.id]
        assert label.right == (good and label.fault is None), action.id


def test_no_label_is_in_what_a_coach_is_shown():
    assert {f.name for f in dataclasses.fields(RecordedAction)}.isdisjoint({"right", "fault", "culprit", "label"})
    raw = gzip.decompress((FOLDER / ACTIONS).read_bytes()).decode()
    secret = [name for name in FAULTS if "_" in name] + ["culprit", '"right"', '"fault"', "injected"]
    assert [word for word in secret if word in raw] == []
    shown = [repr(a.view(aware=True)) for a in read_actions()]
    assert not any(word in text for text in shown for word in secret)


def test_m06_the_reference_is_shown_to_an_aware_coach_alone():
    action = dataclasses.replace(read_actions()[0], reference="REFERENCE42", info={"sentence": "REFERENCE42"})
    assert "REFERENCE42" not in repr(action.view(aware=False))
    assert action.view(aware=True).ground_truth == "REFERENCE42"


@pytest.mark.parametrize(("agent", "fault"), [(agent, fault) for agent in SCENES for fault in faults_of(agent)])
def test_a_fault_changes_a_right_action_into_a_wrong_one_the_same_each_time(agent, fault):
    scene = SCENES[agent]
    spoilt = inject(fault, scene, "0")
    assert spoilt == inject(fault, scene, "0")
    assert spoilt != scene.said
    if agent != "coder":
        assert sound(scene, None, True)
        assert not sound(dataclasses.replace(scene, said=spoilt), None, True)


def test_a_fault_that_would_change_nothing_is_refused():
    with pytest.raises(ValueError, match="changes nothing"):
        inject("missing_file", dataclasses.replace(SCENES["coder"], said="print(7)"), "0")


def test_an_agent_is_judged_by_what_it_was_handed():
    broken = Scene(READING, "answerer", "The shy dog lives in Rome.", "Rome")
    assert sound(broken, None, True)
    assert not sound(dataclasses.replace(broken, said="bell"), None, True), "an answer that is not in its input"
    crashed = Scene(ADDING, "reporter", "Traceback (most recent call last):\nNameError", "<answer>none</answer>")
    assert sound(crashed, None, True)
    assert not sound(dataclasses.replace(crashed, said="<answer>7</answer>"), None, True)
    assert sound(SCENES["coder"], "7\n", True)
    assert not sound(SCENES["coder"], "7\n", False), "the file was not saved"
    assert not sound(SCENES["coder"], "8", True)


def test_the_plan_is_fixed_by_its_seed_and_gives_agents_their_faults_in_turn():
    tasks = computing_tasks(0, 60)
    assert len({task.question for task in tasks}) == 60
    plan = planned(tasks, ("coder", "reporter"), 3)
    assert plan == planned(tasks, ("coder", "reporter"), 3) != planned(tasks, ("coder", "reporter"), 4)
    assert len(plan) == 45
    assert {place for place, _ in plan.values()} == {0, 1}
    assert {fault for place, fault in plan.values() if place == 0} == set(faults_of("coder"))
    assert all(fault in faults_of("reporter") for place, fault in plan.values() if place == 1)


def test_what_is_written_is_read_back_and_equal_values_give_equal_bytes(tmp_path):
    actions, labels = read_actions()[:3], [Label("a", True, None, None)]
    for name in ("one", "two"):
        write(tmp_path / name, actions, labels, {"seed": 0})
    assert read_actions(tmp_path / "one") == actions
    assert read_labels(tmp_path / "one") == {"a": labels[0]}
    assert (tmp_path / "one" / ACTIONS).read_bytes() == (tmp_path / "two" / ACTIONS).read_bytes()


def test_a_broken_file_of_actions_is_a_located_fault(tmp_path):
    (tmp_path / ACTIONS).write_bytes(gzip.compress(json.dumps({"id": "x"}).encode()))
    with pytest.raises(DataError, match="holds no recorded actions"):
        read_actions(tmp_path)


def test_the_recorded_files_travel_with_the_package():
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["agentrl.recipes.mappa.actions"]
    carried = {path.name for pattern in patterns for path in FOLDER.glob(pattern)}
    assert carried == {ACTIONS, LABELS, "provenance.json", "computing.yaml"}
