"""Folders laid out as DSBench, and the suite of scikit-learn's data sets in that layout (MAPPA M-29)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import DatasetConfig
from agentrl.data import EMBEDDED, load_tasks, overlap
from agentrl.data.dsbench import dsbench_tasks
from agentrl.data.sklearn_suite import PROBLEMS, prepared, sizes
from agentrl.errors import ConfigError, DataError
from agentrl.grading.tabular import score_table, spec_of

SCRIPT = """\
parser.add_argument('--value', type=str, default="Exited")
performance = {}(answers[args.value], predictions[args.value])
"""


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.fixture
def bench(tmp_path: Path):
    """`bench(name, answers, script=..., baseline=..., best=...)` adds a task to a folder and returns the folder."""

    def add(name: str, answers: str, script: str | None = None, **results: float) -> Path:
        for path, text in {
            f"data/task/{name}.txt": f"Do {name}.\n",
            f"data/data_resplit/{name}/train.csv": "id,x,y\n1,2,3\n",
            f"data/data_resplit/{name}/test.csv": "id,x\n1,2\n",
            f"data/data_resplit/{name}/sample_submission.csv": "id,y\n1,0\n",
            f"data/answers/{name}/test_answer.csv": answers,
            **({f"evaluation/{name}_eval.py": script} if script else {}),
            **{
                f"save_performance/{'GT' if which == 'best' else which}/{name}/result.txt": str(value)
                for which, value in results.items()
            },
        }.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return add


NUMBERS = "id,y\n" + "".join(f"{i},{i / 7}\n" for i in range(30))
WORDS = "id,y\n" + "".join(f"{i},{'abcd'[i % 4]}\n" for i in range(30))


def test_a_task_has_its_files_its_question_and_what_it_is_scored_by(bench):
    root = bench("bank", "id,Exited\n" + "".join(f"{i},{i % 2}\n" for i in range(9)),
                 SCRIPT.format("roc_auc_score"), baseline=0.5, best=0.9)  # fmt: skip
    (task,) = dsbench_tasks(root)
    assert [Path(name).name for name in task.files] == ["train.csv", "test.csv", "sample_submission.csv"]
    assert task.question.startswith("Do bank.")
    assert "columns id, Exited" in task.question
    assert "auc" in task.question
    assert (task.info["metric"], task.info["kind"]) == ("auc", "classification")
    spec = spec_of(task.info)
    assert (spec.id_column, spec.targets, spec.baseline, spec.best) == ("id", ("Exited",), 0.5, 0.9)
    assert dsbench_tasks(root / "data") == [task]
    assert load_tasks(DatasetConfig(path=str(root))) == [task]


def test_m29_hidden_answers_are_no_file_of_the_task(bench):
    (task,) = dsbench_tasks(bench("a", NUMBERS, baseline=1.0, best=0.1, script="performance = rmse(a, b)"))
    assert not [name for name in task.files if "answer" in Path(name).name]
    assert "answer" not in task.question.replace("form of the answer", "")
    assert Path(task.info["answers_file"]).is_file()


@pytest.mark.parametrize(
    ("performance", "metric"),
    [
        ("roc_auc_score(a, b)", "auc"),
        ("accuracy_score(a, b)", "accuracy"),
        ("np.sqrt(mean_squared_error(a, b))", "rmse"),
        ("mean_squared_error(a, b, squared=False)", "rmse"),
        ("mean_squared_error(a, b)", "mse"),
        ("np.sqrt(mean_squared_log_error(a, b))", "rmsle"),
        ("rmsle(a, b)", "rmsle"),
        ("mean_absolute_error(a, b)", "mae"),
        ("f1_score(a, b)", "f1"),
        ("f1_score(a, b, average='macro')", "f1"),
        ("log_loss(a, b)", "logloss"),
        ("r2_score(a, b)", "r2"),
    ],
)
def test_the_metric_is_read_from_the_benchmarks_own_script(bench, performance, metric):
    (task,) = dsbench_tasks(bench("a", NUMBERS, f"x = 1\nperformance = {performance}\n", baseline=1.0, best=0.5))
    assert task.info["metric"] == metric


@pytest.mark.parametrize("performance", ["cohen_kappa_score(a, b)", "f1_score(a, b, average='micro')", "smape(a, b)"])
def test_a_baseline_in_a_metric_that_nobody_names_is_refused_rather_than_misread(bench, performance):
    root = bench("odd", NUMBERS, f"performance = {performance}\n", baseline=1.0, best=0.5)
    with pytest.raises(DataError, match="nothing names the metric of task odd") as caught:
        dsbench_tasks(root)
    assert "tasks.json" in caught.value.fix
    (root / "tasks.json").write_text(json.dumps({"odd": {"metric": "mae"}}))
    assert dsbench_tasks(root)[0].info["metric"] == "mae"
    bench("other", NUMBERS)
    (root / "tasks.json").write_text(json.dumps({"odd": None}))
    assert [task.id for task in dsbench_tasks(root)] == ["other"]


def test_m29_string_labels_are_classes_whatever_their_number(bench):
    (task,) = dsbench_tasks(bench("a", WORDS))
    assert (task.info["kind"], task.info["metric"]) == ("classification", "accuracy")


def test_four_tasks_of_each_kind_are_held_out_the_same_ones_each_time(bench):
    for i in range(9):
        root = bench(f"n{i}", NUMBERS)
        bench(f"w{i}", WORDS)
    held, train = (dsbench_tasks(root, split) for split in ("eval", "train"))
    kinds = [task.info["kind"] for task in held]
    assert (kinds.count("classification"), kinds.count("regression"), len(train)) == (4, 4, 10)
    assert not {task.id for task in held} & {task.id for task in train}
    assert dsbench_tasks(root, "eval") == held
    with pytest.raises(ConfigError, match=r"data\.split: 'dev'"):
        dsbench_tasks(root, "dev")


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda root: (root / "data/answers/a/test_answer.csv").unlink(), "test_answer.csv: no such file"),
        (lambda root: (root / "data/data_resplit/a/test.csv").unlink(), "test.csv: no such file"),
        (lambda root: (root / "data/answers/a/test_answer.csv").write_text("id\n1\n"), "not a table"),
        (lambda root: (root / "data/task/a.txt").unlink(), "no DSBench folder"),
        (lambda root: (root / "tasks.json").write_text("{"), "broken JSON"),
        (lambda root: (root / "tasks.json").write_text('{"b": {}}'), "there is no task 'b'"),
        (lambda root: (root / "tasks.json").write_text('{"a": {"metrik": 1}}'), "unknown key 'metrik'"),
        (lambda root: (root / "tasks.json").write_text('{"a": {"targets": ["z"]}}'), "no column 'z'"),
        (lambda root: (root / "save_performance/GT/a/result.txt").write_text("nan?"), "no number"),
    ],
)
def test_a_broken_folder_is_told_with_the_file(bench, break_it, fault):
    root = bench("a", NUMBERS, "performance = rmse(a, b)", baseline=1.0, best=0.5)
    break_it(root)
    with pytest.raises(DataError, match=fault):
        dsbench_tasks(root)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory):
    """The real suite, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(tmp_path_factory.mktemp("home")))
        yield {s: load_tasks(DatasetConfig(path="dsbench-sklearn", split=s)) for s in ("train", "eval")}, prepared()


def test_the_suite_holds_real_tables_whose_ids_join(suite):
    tasks, folder = suite
    assert {s: len(t) for s, t in tasks.items()} == dict(EMBEDDED["dsbench-sklearn"].sizes) == sizes()
    for task in (*tasks["train"], *tasks["eval"]):
        train, test, form = (rows(Path(name)) for name in task.files)
        answers = rows(Path(task.info["answers_file"]))
        assert train[0][:-1] == test[0]
        assert answers[0] == form[0] == ["id", task.info["targets"][0]]
        assert [row[0] for row in test] == [row[0] for row in answers]
        assert not {row[0] for row in train[1:]} & {row[0] for row in test[1:]}
        assert len({row[0] for row in train[1:]}) == len(train) - 1
        assert Path(task.info["answers_file"]).is_relative_to(folder)
    assert {p.name for p in PROBLEMS if p.dataset == "iris"} == {"species", "petal-width"}


def test_m29_the_suites_answers_score_one_or_more_its_baseline_zero_and_its_kinds_are_right(suite):
    kinds = {p.dataset + "-" + p.name: p.kind for p in PROBLEMS}
    for task in (*suite[0]["train"], *suite[0]["eval"]):
        answers = Path(task.info["answers_file"]).read_text()
        perfect = score_table(answers, answers, spec_of(task.info))
        assert perfect.normalised is not None
        assert perfect.normalised >= 1.0
        constant = Path(task.files[2]).read_text()
        assert score_table(constant, answers, spec_of(task.info)).ok
        unstated: dict[str, Any] = {k: v for k, v in task.info.items() if k not in ("kind", "metric")}
        found = score_table(answers, answers, spec_of(unstated)).kind
        assert found == task.info["kind"] == kinds[task.id.rpartition("-")[0]]


def test_m32_the_suites_held_out_tasks_share_no_data_set_with_the_others(suite):
    train, held = suite[0]["train"], suite[0]["eval"]
    assert not {t.info["dataset"] for t in train} & {t.info["dataset"] for t in held}
    assert overlap(train, held) == []
    first = [task.info["kind"] for task in load_tasks(DatasetConfig(path="dsbench-sklearn", split="eval", limit=2))]
    assert sorted(first) == ["classification", "regression"]
    with pytest.raises(ConfigError, match=r"data\.limit: 9 is more than the 8 eval tasks"):
        load_tasks(DatasetConfig(path="dsbench-sklearn", split="eval", limit=9))


def test_prepare_prints_the_folder_that_data_path_may_name(suite, monkeypatch, capsys):
    from agentrl.cli.data import data_prepare, data_show

    monkeypatch.setenv("AGENTRL_HOME", str(suite[1].parent.parent))
    data_prepare("dsbench-sklearn", json_output=True)
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert Path(folder) == suite[1]
    data_show(folder, json_output=True)
    assert json.loads(capsys.readouterr().out)["tables"][0]["rows"] == 24
    data_show("dsbench-sklearn", json_output=True)
    assert [t["rows"] for t in json.loads(capsys.readouterr().out)["tables"]] == [16, 8]
