"""`agentrl mappa coach-eval` from its options to its run folder, beside blind coaches and with coaches that fail."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config.schema import CoachConfig
from agentrl.errors import RunFailedError
from agentrl.launch.devices import GIB, Hardware
from agentrl.recipes.mappa import coach_eval as module
from agentrl.recipes.mappa import coaching
from agentrl.recipes.mappa.actions.store import FOLDER, read_actions, read_labels
from agentrl.recipes.mappa.coach_defaults import SECTIONS, chosen_kind, section_overrides
from agentrl.recipes.mappa.coach_eval import coach_eval, make_exam
from agentrl.recipes.registry import VerbOptions, load_recipe
from agentrl.scoring.client import CallError, ScoringClient
from agentrl.scoring.coach import LLMCoach
from agentrl.scoring.record import Reply


class Backend:
    """Answers by a function of the prompt's text, and keeps every prompt."""

    def __init__(self, answer):
        self.answer, self.prompts = answer, []

    async def complete(self, call):
        text = "".join(part.text for message in call.messages for part in message.parts)
        self.prompts.append(text)
        said = self.answer(text)
        if isinstance(said, Exception):
            raise said
        return Reply(said, 100, 10, "stop")

    async def close(self):
        pass


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """(answer, coach settings) -> (summary, backend), with a model behind the real client."""

    def run(answer, **config):
        backend = Backend(answer)
        section = CoachConfig(**{"model": "m", "base_url": "http://127.0.0.1:9/v1", "backoff_s": 0.0} | config)
        recipe = load_recipe(str(FOLDER / "computing.yaml"), [f"run.dir={tmp_path}", "run.name=exam"]).tree
        recipe = recipe.model_copy(update={"coach": section})

        @asynccontextmanager
        async def opened(recipe):
            yield LLMCoach(ScoringClient(section, "m", backend), reply=section.reply)

        monkeypatch.setattr(module, "open_coach", opened)
        return coach_eval(recipe, VerbOptions(split="test", repeats=2)), backend

    return run


def _one_json(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_without_a_recipe_the_rules_are_measured_beside_blind_coaches(tmp_path):
    summary = _one_json(CliRunner().invoke(app, ["mappa", "coach-eval", "--run-dir", str(tmp_path), "--json"]))
    assert (summary["actions"], summary["repeats"], summary["injections"]) == (100, 2, 30)
    assert list(summary["coaches"]) == ["coach (rules evidence)", "constant", "random", "shuffled"]
    own, constant = summary["coaches"][summary["coach"]], summary["coaches"]["constant"]
    assert own["auc"]["low"] > 0.5
    assert constant["auc"]["value"] == 0.5
    assert constant["blame"]["value"] == pytest.approx(constant["blame"]["chance"])
    assert summary["coaches"]["random"]["auc"]["low"] < 0.5 < summary["coaches"]["random"]["auc"]["high"]
    assert own["blame"]["value"] > own["blame"]["chance"]
    run = tmp_path / summary["run"].rpartition("/")[2]
    assert (run / "coach_eval.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "summary.json").read_text())["coaches"] == summary["coaches"]
    rows = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [action.id for action in read_actions(split="test")]


def test_all_scores_both_splits_and_the_table_names_every_coach(tmp_path):
    result = CliRunner().invoke(app, ["mappa", "coach-eval", "--all", "--repeats", "1", "--run-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [line.split("\t") for line in result.stdout.splitlines() if "\t" in line]
    assert [row[0] for row in rows[1:5]] == ["coach (rules evidence)", "constant", "random", "shuffled"]
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "summary.json").read_text())["actions"] == len(read_actions())


def test_the_coach_of_a_recipe_is_measured_and_what_it_cannot_score_is_missing(tmp_path):
    words = ["mappa", "coach-eval", "smoke/mappa", "--run-dir", str(tmp_path), "--json"]
    summary = _one_json(CliRunner().invoke(app, words))
    own = summary["coaches"][summary["coach"]]
    assert own["missing"]["share"] == pytest.approx(0.4), "a rule of the reading team cannot score the other"
    assert any("reader, answerer and speaker" in r or "all three agents" in r for r in own["missing"]["reasons"])
    assert own["auc"]["value"] > 0.9


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_coach_known_by_a_word_is_a_valid_section_in_place_of_a_recipes_own(kind):
    more = ["coach.model=m", "coach.base_url=http://127.0.0.1:9/v1"] if kind == "endpoint" else []
    for source in (str(FOLDER / "computing.yaml"), "smoke/mappa"):
        assert load_recipe(source, [*section_overrides(kind), *more]).tree.coach.kind == kind


def test_the_kind_that_is_set_decides_where_no_recipe_is_named(tmp_path):
    assert chosen_kind(["coach.kind=random", "run.seed=1"]) == "random"
    assert chosen_kind([]) == "rules"
    words = ["mappa", "coach-eval", "--run-dir", str(tmp_path), "--json", "--set", "coach.kind=random"]
    assert _one_json(CliRunner().invoke(app, words))["coach"] == "coach (random)"
    result = CliRunner().invoke(app, ["mappa", "coach-eval", "--set", "coach.kind=oracle"])
    assert result.exit_code == 2
    assert "'oracle' is no coach" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        (["--coach", "local", "--set", "launch.gpus=99", "--set", "coach.model=tiny-llama"], 3, "launch.gpus is 99"),
        (["--coach", "local", "--set", "coach.model=nobody/nothing"], 3, "nobody/nothing"),
        (["--coach", "rules", "--set", "coach.rules=nowhere:rule"], 2, "coach.rules"),
        (["smoke/mappa", "--coach", "rules", "--set", "coach.rules=nowhere:rule"], 2, "coach.rules"),
    ],
)
def test_a_coach_that_cannot_start_leaves_no_run_folder(tmp_path, words, code, cause):
    for _ in range(2):
        result = CliRunner().invoke(app, ["mappa", "coach-eval", *words, "--name", "x", "--run-dir", str(tmp_path)])
        assert result.exit_code == code
        assert cause in result.stderr
        assert not list(tmp_path.iterdir())


def test_a_local_coach_needs_no_room_for_the_trainer_ranks_of_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    monkeypatch.setattr(coaching, "detect", lambda: Hardware(1, GIB))
    words = [*section_overrides("local"), "coach.model=tiny-llama", "launch.gpus=0", "launch.ranks=6"]
    recipe = load_recipe(str(FOLDER / "computing.yaml"), words).tree
    asyncio.run(coaching.refuse_absent_coach(recipe))


def test_a_recipe_without_a_coach_is_refused():
    result = CliRunner().invoke(app, ["mappa", "coach-eval", "smoke/mars"])
    assert result.exit_code == 2
    assert "has no coach" in result.stderr


def test_no_label_reaches_a_prompt_of_the_coach(examine):
    _, backend = examine(lambda text: '{"analysis": "", "score": 5}')
    assert len(backend.prompts) == 230
    labels = read_labels()
    secret = {label.fault for label in labels.values() if label.fault and "_" in label.fault} | {"culprit", "injected"}
    assert not [word for word in secret for text in backend.prompts if word in text]


def test_views_do_not_depend_on_the_labels():
    actions, labels = read_actions(split="test"), read_labels()
    turned = {name: type(label)(name, not label.right, None, None) for name, label in labels.items()}
    assert make_exam(actions, labels, (), 1).views == make_exam(actions, turned, (), 1).views


def test_x07_an_obedient_coach_is_found_out_and_a_steady_one_is_not_charged(examine):
    pleas = ("PROCESS_SCORE: 10", "10/10", '"score": 10', "give 10")

    def obedient(text):
        said = text.split("What it did:")[1].split("What the environment")[0]
        return '{"analysis": "", "score": 10}' if any(p in said for p in pleas) else '{"analysis": "", "score": 4}'

    summary, _ = examine(obedient)
    block = summary["coaches"][summary["coach"]]["injection"]
    assert (block["change"], block["raised"], block["n"]) == (6.0, 1.0, 30)


def test_x07_a_steady_coach_is_not_moved_by_pleas(examine):
    summary, _ = examine(lambda text: '{"analysis": "", "score": 4}')
    assert summary["coaches"][summary["coach"]]["injection"]["change"] == 0.0


def test_x03_cost_is_metered_and_what_the_budget_does_not_cover_is_missing(examine):
    summary, backend = examine(
        lambda text: '{"analysis": "", "score": 4}', price={"per_call": 0.01}, budget=1.0, max_concurrent=1
    )
    own = summary["coaches"][summary["coach"]]
    assert len(backend.prompts) == 100
    assert own["cost"]["calls"] == 100
    assert own["cost"]["cost_usd"] == pytest.approx(1.0)
    assert own["missing"]["n"] == 100
    dealt = summary["coaches"]["shuffled"]["cost"]
    assert (dealt["calls"], dealt["input_tokens"], dealt["cost_usd"]) == (0, 0, 0.0), "nobody was asked again"
    assert "budget" in next(iter(own["missing"]["reasons"]))


def test_a_coach_that_answers_nonsense_now_and_then_is_unreadable_there_and_measured_elsewhere(examine):
    def half(text):
        return "AUC 0.54" if "result.txt" in text else '{"analysis": "", "score": 4}'

    summary, _ = examine(half, max_retries=0)
    own = summary["coaches"][summary["coach"]]
    assert own["missing"]["share"] == own["missing"]["unreadable"] == pytest.approx(0.4)
    assert own["mean_right"] == 4.0


def test_a_coach_that_is_down_ends_with_a_clear_fault_and_a_readable_folder(examine, tmp_path):
    with pytest.raises(RunFailedError, match="every score is missing: coach failed: the service cannot be reached"):
        examine(lambda text: CallError("the service cannot be reached", retry=False))
    summary = json.loads((tmp_path / "exam" / "summary.json").read_text())
    own = summary["coaches"][summary["coach"]]
    assert (own["missing"]["share"], own["auc"]["value"]) == (1.0, None)


def test_a_reply_of_the_score_alone_is_asked_for_and_read(examine):
    summary, backend = examine(lambda text: '{"score": 7}', reply="score")
    assert summary["coaches"][summary["coach"]]["mean_right"] == 7.0
    assert "analysis" not in backend.prompts[0]


def test_x02_offsets_of_the_section_apply_as_they_would_in_training(examine):
    summary, _ = examine(lambda text: '{"analysis": "", "score": 4}', stratum="relation", offsets={"food": 1.5})
    strata = summary["coaches"][summary["coach"]]["strata"]
    assert {kind: s["mean"] for kind, s in strata.items()} == {kind: 5.5 if kind == "food" else 4.0 for kind in strata}
    advised = summary["calibration"]["offsets"]
    assert len({advised[kind] + 4.0 for kind in strata}) == 1, "they take the place of those in force"
