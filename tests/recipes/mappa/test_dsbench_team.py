"""The shipped DSBench team on real tables, pickles and models in the real sandbox; only the words are scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.config.schema import DatasetConfig, PythonToolConfig
from agentrl.data import load_tasks
from agentrl.errors import MissingError
from agentrl.grading.table_report import table_report
from agentrl.grading.tabular import TableGrader
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.registry import load_recipe
from agentrl.rollout.tools.python import PythonTool
from agentrl.scoring.rules import artifacts
from agentrl.types import Task

ENGINEER = """\
import pandas as pd
train, test = pd.read_csv("train.csv"), pd.read_csv("test.csv")
target = train.columns[-1]
train.drop(columns=["id", target]).to_pickle("X_train.pkl")
train[target].to_pickle("y_train.pkl")
test.drop(columns=["id"]).to_pickle("X_test.pkl")
print(train.shape, test.shape)"""
MODELER = """\
import pickle
import pandas as pd
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
X, y = pd.read_pickle("X_train.pkl"), pd.read_pickle("y_train.pkl")
classes = y.dtype.kind not in "f"
model = (RandomForestClassifier if classes else RandomForestRegressor)(n_estimators=20, random_state=0).fit(X, y)
pickle.dump(model, open("model.pkl", "wb"))
print(type(model).__name__)"""
ANALYST = """\
import pickle
import pandas as pd
form, test = pd.read_csv("sample_submission.csv"), pd.read_csv("test.csv")
predicted = pickle.load(open("model.pkl", "rb")).predict(pd.read_pickle("X_test.pkl"))
pd.DataFrame({"id": test["id"], form.columns[1]: predicted}).sample(frac=1, random_state=1).to_csv(
    "submission.csv", index=False)
print(len(predicted))"""
PEEK = """\
import os
for folder in ("/", os.getcwd(), os.path.dirname(os.getcwd())):
    print([name for name in os.listdir(folder) if "answer" in name])
print(os.path.exists("{answers}"))"""


def block(code: str) -> str:
    return f"I will.\n```python\n{code}\n```"


@pytest.fixture(scope="module")
def python() -> PythonTool:
    tool = PythonTool(PythonToolConfig(timeout_s=60.0, max_concurrent=2))
    try:
        asyncio.run(tool.sandbox.probe())
    except MissingError as error:
        pytest.skip(f"no sandbox here: {error.cause}")
    return tool


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Task]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(tmp_path_factory.mktemp("home")))
        return {task.id: task for task in load_tasks(DatasetConfig(path="dsbench-sklearn", split="eval"))}


def team(*sets: str) -> MappaRecipe:
    """The shipped recipe as it is, but for its models; tiny-llama's tokens are single bytes, hence the wide budgets."""
    names = ("data_engineer", "modeler", "analyst")
    models = [f"policies.{n}.{k}" for n in names for k in ("name=tiny-llama", "dtype=float32")]
    wide = [f"agents.{n}.max_{k}_tokens=60000" for n in names for k in ("prompt", "response")]
    tree = load_recipe("dsbench", [*models, *wide, "launch.gpus=0", *sets]).tree
    assert isinstance(tree, MappaRecipe)
    return tree


GOOD = {"data_engineer": [block(ENGINEER), "Saved."], "modeler": [block(MODELER), "Fitted."],
        "analyst": [block(ANALYST), "Done."]}  # fmt: skip


def test_m29_a_team_that_writes_right_programs_scores_on_a_class_and_on_a_number(roll, lab, python, tasks):
    chosen = [tasks["wine-cultivar-1"], tasks["wine-alcohol-1"]]
    done = roll(team(), GOOD, [python], tasks=chosen, reward=TableGrader(), coach=lab.coach(artifacts_of))
    for one in done.collected.scored:
        assert one.trajectory.status == "ok", one.trajectory.status_reason
        assert one.outcome.value is not None, one.outcome.reason
        assert one.outcome.value > 0.5, (one.outcome, [t.observation for t in one.trajectory.turns])
        assert len(one.trajectory.turns) == 6
        assert {score.value for score in one.action_scores} == {8.0}
    report = table_report([one.outcome for one in done.collected.scored])
    assert report["success_rate"] == 1.0
    assert report["classification"]["accuracy"]["fair"] > 0.9
    analyst = done.coach.of("analyst")[0]
    assert analyst.ledger["available"]["X_test.pkl"] == "data_engineer"
    assert analyst.ledger["available"]["model.pkl"] == "modeler"
    assert analyst.ledger["available"]["train.csv"] == "task"
    assert analyst.ground_truth is None


def artifacts_of(view):
    return artifacts(view)[0]


def test_m08_an_engineer_that_omits_x_test_is_to_blame_and_the_others_are_not(roll, lab, python, tasks):
    without = ENGINEER.replace('test.drop(columns=["id"]).to_pickle("X_test.pkl")\n', "")
    voices = GOOD | {"data_engineer": [block(without), "Saved."]}
    done = roll(
        team(), voices, [python], tasks=[tasks["wine-strong-1"]], reward=TableGrader(), coach=lab.coach(artifacts_of)
    )
    scores = {}
    for turn, score in zip(done.only.trajectory.turns, done.only.action_scores, strict=True):
        scores[turn.action.agent] = score.value
    assert scores == {"data_engineer": 3.0, "modeler": 8.0, "analyst": 6.0}
    assert "X_test.pkl: MISSING, data_engineer should have saved it" in done.prompts("analyst")[0]
    assert done.coach.of("data_engineer")[0].ledger["missing"] == ["X_test.pkl"]
    assert "FileNotFoundError" in done.coach.of("analyst")[0].feedback
    assert (done.only.outcome.value, done.only.outcome.reason) == (0.0, "no answer")
    assert table_report([done.only.outcome])["success_rate"] == 0.0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (".iloc[1:]", "lacks 1 of"),
        (".assign(**{form.columns[1]: float('nan')})", "empty or NaN predictions"),
        (".assign(id=lambda t: t['id'].iloc[0])", "repeat the id"),
    ],
    ids=["missing row", "NaN", "one id"],
)
def test_m29_a_spoiled_submission_has_failed_with_its_reason(roll, lab, python, tasks, spoil, reason):
    spoiled = ANALYST.replace(".sample(frac=1, random_state=1)", spoil)
    submit = spoiled.replace('pickle.load(open("model.pkl", "rb")).predict(pd.read_pickle("X_test.pkl"))', "1")
    voices = {"data_engineer": "Nothing.", "modeler": "Nothing.", "analyst": [block(submit.replace("len", "type"))]}
    sets = [f"agents.{n}.max_turns=1" for n in ("data_engineer", "modeler", "analyst")]
    done = roll(team(*sets), voices, [python], tasks=[tasks["wine-strong-1"]], reward=TableGrader())
    assert done.only.outcome.value == 0.0
    assert reason in done.only.outcome.reason


def test_m06_hidden_answers_are_out_of_reach_and_known_to_an_aware_coach_alone(roll, lab, python, tasks):
    task = tasks["wine-strong-1"]
    answers = Path(task.info["answers_file"])
    assert answers.is_file()
    constant = 'import pandas as pd\nt = pd.read_csv("sample_submission.csv")\nt.to_csv("submission.csv", index=False)'
    voices = {
        "data_engineer": block(PEEK.format(answers=answers)),
        "modeler": "Nothing.",
        "analyst": ["Not yet.", "Done."],
    }
    sets = [f"agents.{n}.max_turns=1" for n in ("data_engineer", "modeler", "analyst")]
    done = roll(team(*sets), voices, [python], tasks=[task], reward=TableGrader())
    assert done.only.trajectory.turns[0].observation.text.split() == ["[]", "[]", "[]", "False"]
    assert all(view.ground_truth is None and not view.task.info for view in done.coach.views)

    voices["analyst"] = [block(constant)]
    aware = team(*sets, "coach.ground_truth=[analyst]")
    done = roll(aware, voices, [python], tasks=[task], reward=TableGrader())
    (view,) = done.coach.of("analyst")
    assert view.ground_truth.startswith("the submission on the hidden answers: accuracy")
    assert all(view.ground_truth is None for view in done.coach.views if view.agent != "analyst")
    assert "hidden answers" not in "".join(done.prompts("analyst"))


FORM = 'import pandas as pd\nt = pd.read_csv("sample_submission.csv")\nt{}.to_csv("submission.csv", index=False)'
HANDED_IN = "the submission on the hidden answers: accuracy"
ONE_TURN = [f"agents.{n}.max_turns=1" for n in ("data_engineer", "modeler")]
HINDSIGHT = ["mappa.hindsight=true", "coach.ground_truth=[data_engineer,analyst]"]


def test_x01_in_hindsight_an_aware_coach_sees_the_final_submissions_metrics_at_every_action(roll, lab, python, tasks):
    voices = {
        "data_engineer": "Nothing.",
        "modeler": "Nothing.",
        "analyst": [block(FORM.format(".iloc[1:]")), block(FORM.format("")), "Done."],
    }
    coach = lab.coach(lambda view: 9.0 if (view.ground_truth or "").startswith(HANDED_IN) else 1.0)
    task = tasks["wine-strong-1"]
    done = roll(team(*ONE_TURN, *HINDSIGHT), voices, [python], tasks=[task], reward=TableGrader(), coach=coach)
    agents = [turn.action.agent for turn in done.only.trajectory.turns]
    assert agents == ["data_engineer", "modeler", "analyst", "analyst", "analyst"]
    seen = [view.ground_truth for view in coach.views]
    assert seen[0] == "there is no submission yet"
    assert "cannot be scored: the submission lacks 1 of" in seen[2]
    first, again = seen[:5], seen[5:]
    assert again[0].startswith(HANDED_IN)
    assert again == [first[4], None, first[4], first[4], first[4]]
    assert [score.value for score in done.only.action_scores] == [9.0, 1.0, 9.0, 9.0, 9.0]
    assert [score.info["immediate"] for score in done.only.action_scores] == [1.0, 1.0, 1.0, 9.0, 9.0]


def test_x01_in_hindsight_of_a_failed_rollout_the_last_submission_counts(roll, lab, python, tasks):
    early = {"data_engineer": "Nothing.", "modeler": block(FORM.format("")), "analyst": "never asked"}
    sets = [*ONE_TURN, *HINDSIGHT, "agents.modeler.collect=['*.csv']", "agents.analyst.max_prompt_tokens=1"]
    done = roll(team(*sets), early, [python], tasks=[tasks["wine-strong-1"]], reward=TableGrader())
    assert done.only.trajectory.status == "failed"
    truths = [view.ground_truth for view in done.coach.of("data_engineer")]
    assert truths[0] == "there is no submission yet"
    assert truths[1].startswith(HANDED_IN)
