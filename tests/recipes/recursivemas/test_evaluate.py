"""Evaluation beside its controls, on tiny models: one command, one table, costs kept apart, times that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from held_out import MESSAGE, QUESTIONS, ROLLOUTS, ROUNDS, STEPS, TEXT_TOKENS, records

from agentrl.recipes.recursivemas.comparison import reductions
from agentrl.recipes.recursivemas.config import CONTROLS
from agentrl.recipes.recursivemas.evaluate import evaluate
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.registry import Silence, VerbOptions, load_recipe


@pytest.fixture(scope="module")
def result(tmp_path_factory, make_recipe):
    """One evaluation with every control; messages of exactly five tokens."""
    tmp = tmp_path_factory.mktemp("eval")
    (tmp / "q.jsonl").write_text(
        "".join(json.dumps({"id": i, "question": q, "answer": a}) + "\n" for i, q, a in QUESTIONS), "utf-8"
    )
    own = {"answer": "short", "controls": "all", "text_team": {"max_tokens": MESSAGE, "exact": True}, "max_batch": 2}
    data = make_recipe("sequential_light", rounds=ROUNDS, latent_steps=STEPS, **own).model_dump(
        mode="json", exclude_unset=True
    )
    data |= {
        "run": {"steps": 0, "dir": str(tmp / "runs")},
        "launch": {"threads": 1},
        "data": {"path": str(tmp / "q.jsonl")},
    }
    for agent in data["agents"].values():
        agent["sampling"] |= {"temperature": 0.0, "max_tokens": TEXT_TOKENS}
    recipe = RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)
    return evaluate(recipe, VerbOptions())


def test_t25_one_command_gives_the_ring_and_every_control_side_by_side(result):
    assert list(result["controls"]) == ["ring", *CONTROLS]
    for name, row in result["controls"].items():
        assert row["strict"]["n"] == 3
        assert set(row["strict"]["items"]) == {"a", "b", "c"}
        assert row["f1"]["n"] == 3
        assert ("difference" in row) == (name != "ring")
        assert set(records(result, name)) == {"a", "b", "c"}
    assert result["controls"]["text"]["difference"]["n"] == 3
    assert result["eval"] == result["controls"]["ring"]["strict"]
    assert result["links"]["trained"] is False
    assert "TextGrad" in result["not_reproduced"]
    summary = json.loads((Path(result["run"]) / "summary.json").read_text("utf-8"))
    assert summary["controls"] == json.loads(json.dumps(result["controls"]))


def test_t25_the_text_team_hears_texts_where_the_ring_hears_latents(result):
    text, ring = records(result, "text"), records(result, "ring")
    for name in "abc":
        turns = text[name]["turns"]
        assert [(t["turn"], t["agent"]) for t in turns] == [
            (1, "planner"),
            (1, "critic"),
            (1, "solver"),
            (2, "planner"),
            (2, "critic"),
            (2, "solver"),
        ]
        assert all(len(t["token_ids"]) == MESSAGE for t in turns[:-1])
        assert [len(ring[name]["turns"]), ring[name]["turns"][0]["agent"]] == [1, "solver"]


def test_t26_costs_match_hand_counts_and_are_kept_apart(result):
    rows = result["controls"]
    for name in ("ring", "zero", "shuffled"):
        assert rows[name]["latent_steps_per_question"] == ROLLOUTS * STEPS
        assert rows[name]["text_tokens_per_question"] == TEXT_TOKENS
        assert "tokens_per_message" not in rows[name]
    for name in ("single", "none"):
        assert rows[name]["latent_steps_per_question"] == 0
        assert rows[name]["text_tokens_per_question"] == TEXT_TOKENS
    team = rows["text"]
    assert team["latent_steps_per_question"] == 0
    assert team["text_tokens_per_question"] == ROLLOUTS * MESSAGE + TEXT_TOKENS
    assert (team["tokens_per_message"], team["messages_per_question"]) == (MESSAGE, ROLLOUTS)
    ring = records(result, "ring")
    prompts = sum(r["counts"]["prompt_positions"] for r in ring.values())
    reused = sum(r["counts"]["reused_positions"] for r in ring.values())
    assert reused > 0
    assert rows["ring"]["prompt_positions_per_question"] == pytest.approx(prompts / 3)
    # 5 rollouts feed 3 steps back each; of 6 tokens 5 are fed back
    by_hand = prompts - reused + 3 * (ROLLOUTS * (STEPS - 1) + TEXT_TOKENS - 1)
    assert rows["ring"]["positions_per_question"] == pytest.approx(by_hand / 3)


def test_t26_the_text_team_computes_what_it_reads_once_and_what_it_writes(result):
    team = records(result, "text")
    saved = 0
    for record in team.values():
        counts, turns = record["counts"], record["turns"]
        assert counts["prompt_positions"] == sum(t["prompt_tokens"] for t in turns)
        fed_back = ROLLOUTS * (MESSAGE - 1) + TEXT_TOKENS - 1
        assert counts["positions"] == counts["prompt_positions"] - counts["reused_positions"] + fed_back
        assert counts["reused_positions"] > 0
        saved += counts["positions"]
    # The decoder's plain prompts of a batch share their beginning, which is computed once.
    assert 3 * result["controls"]["text"]["positions_per_question"] < saved


def test_t26_both_reductions_are_given(result):
    team, ring = ROLLOUTS * MESSAGE + TEXT_TOKENS, TEXT_TOKENS
    assert result["reductions"]["text_tokens"] == pytest.approx(1 - ring / team)
    assert result["reductions"]["text_tokens_and_latent_steps"] == pytest.approx(1 - (ring + ROLLOUTS * STEPS) / team)
    assert result["reductions"]["times_faster"] > 0


def test_t27_the_seconds_of_the_stages_add_up_to_the_wall_time_with_load_apart(result):
    parts = wall = 0.0
    for name, row in result["controls"].items():
        seconds = row["seconds"]
        assert (len(seconds["stages"]) == ROLLOUTS) == (name != "single")
        assert sum(seconds["stages"].values()) + seconds["decode"] <= seconds["wall"] + 0.001
        parts += sum(seconds["stages"].values()) + seconds["decode"]
        wall += seconds["wall"]
    # A busy machine may take the processor away between two stages, so the rows are added up.
    assert parts == pytest.approx(wall, rel=0.02, abs=0.05)
    whole = result["seconds"]
    assert whole["load"] > 0
    assert whole["warm_up"] > 0
    assert wall + whole["load"] + whole["warm_up"] + whole["grading"] <= whole["total"] + 0.01


def test_t29_two_evaluations_give_equal_texts_and_counts(make_held_out):
    recipe = make_held_out(controls=("text", "shuffled"), text_team={"max_tokens": 3})
    first, second = (evaluate(recipe, VerbOptions()) for _ in range(2))
    for name in ("ring", "text", "shuffled"):
        one, other = records(first, name), records(second, name)
        for task in one:
            assert [t["token_ids"] for t in one[task]["turns"]] == [t["token_ids"] for t in other[task]["turns"]]
            assert one[task]["counts"] == other[task]["counts"]


@pytest.mark.parametrize("style", ["mixture", "distillation"])
def test_t25_other_graphs_have_the_same_controls(make_held_out, style):
    result = evaluate(make_held_out(style, controls="all", text_team={"max_tokens": 3, "exact": True}), VerbOptions())
    per_round = {"mixture": 4, "distillation": 2}[style]
    messages = per_round * ROUNDS - 1
    assert result["controls"]["text"]["messages_per_question"] == messages
    assert result["controls"]["ring"]["latent_steps_per_question"] == messages * STEPS


def test_pass_at_k_counts_any_answer_and_latents_once(make_held_out):
    recipe = make_held_out(decodes=4, sampling={"temperature": 1.0}, controls=("text",), text_team={"max_tokens": 3})
    result = evaluate(recipe, VerbOptions())
    row = result["controls"]["ring"]
    assert row["latent_steps_per_question"] == ROLLOUTS * STEPS
    assert row["mean_of_answers"]["trials"] == 12
    assert row["text_tokens_per_question"] > TEXT_TOKENS
    lines = (Path(result["run"]) / "trajectories/step_000000.jsonl").read_text("utf-8").splitlines()
    texts = {}
    for record in map(json.loads, lines):
        texts.setdefault(record["task_id"], set()).add(tuple(record["turns"][-1]["token_ids"]))
        assert (record["counts"]["latent_steps"] > 0) == (record["g"] == 0)
    assert all(len(found) > 1 for found in texts.values())
    team = result["controls"]["text"]
    assert team["messages_per_question"] == ROLLOUTS


def test_without_a_text_team_there_is_nothing_to_reduce(make_held_out):
    result = evaluate(make_held_out(controls=("none",)), VerbOptions())
    assert result["reductions"] is None
    assert reductions({"ring": {}}) is None
    assert result["text_team"] is None


def test_a_benchmark_whose_published_numbers_count_several_answers_says_so(make_held_out, tmp_path):
    class Notes(Silence):
        def __init__(self):
            self.notes = []

        def note(self, text):
            self.notes.append(text)

    file = tmp_path / "aime.jsonl"
    file.write_text(json.dumps({"problem": "Find n.", "answer": 7}) + "\n")
    recipe = make_held_out(answer="boxed", rounds=1)
    data = recipe.data.model_copy(update={"path": str(file), "format": "aime2025"})
    told = Notes()
    evaluate(recipe.model_copy(update={"data": data}), VerbOptions(progress=told))
    assert any("count any of 10 answers" in note and "recursivemas.decodes=10" in note for note in told.notes)


@pytest.mark.slow
def test_t25_the_embedded_model_races_the_text_team_on_the_same_graph(tmp_path):
    """Real weights in bf16, random links: whoever writes 32 tokens where the other thinks 8 steps takes longer, and
    greedy texts are the same in two runs."""
    sets = ["recursivemas.allow_untrained=true", "recursivemas.rounds=2", "recursivemas.latent_steps=8"]
    sets += [
        "recursivemas.controls=[text]",
        "recursivemas.text_team.max_tokens=32",
        "recursivemas.text_team.exact=true",
    ]
    sets += ["data.eval.limit=3", f"run.dir={tmp_path}", "launch.threads=1"]
    recipe = load_recipe("smoke/recursivemas", sets).tree
    first, second = (evaluate(recipe, VerbOptions()) for _ in range(2))
    rows = first["controls"]
    assert rows["text"]["tokens_per_message"] == 32
    assert rows["ring"]["latent_steps_per_question"] == ROLLOUTS * 8
    assert first["reductions"]["times_faster"] > 1.3  # 3.7 at 64 tokens, 16 steps and 3 rounds
    for name in ("ring", "text"):
        seconds = rows[name]["seconds"]
        parts = sum(seconds["stages"].values()) + seconds["decode"]
        assert parts == pytest.approx(seconds["wall"], rel=0.02, abs=0.01)
        one, other = records(first, name), records(second, name)
        assert [one[t]["turns"][-1]["text"] for t in one] == [other[t]["turns"][-1]["text"] for t in one]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_t25_the_command_line_names_the_controls_and_prints_one_table(tmp_path, capsys):
    from agentrl.cli import app

    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"id": i, "question": q, "answer": a}) + "\n" for i, q, a in QUESTIONS))
    recipe = tmp_path / "ring.yaml"
    policies = {
        n: {"name": m, "dtype": "float32"} for n, m in {"expert": "tiny-gpt2-h96", "learner": "tiny-llama"}.items()
    }
    own = {"style": "distillation", "answer": "short", "rounds": 2, "latent_steps": 3}
    agents = {"learner": {"sampling": {"temperature": 0.0, "max_tokens": 4}}}
    recipe.write_text(
        json.dumps(
            {"method": "recursivemas", "policies": policies, "recursivemas": own, "agents": agents}
            | {"data": {"path": str(file)}, "launch": {"threads": 1}}
        )
    )
    command = ["recursivemas", "eval", str(recipe), "--allow-untrained", "--controls", "text,none", "--name", "x"]
    more = ["--run-dir", str(tmp_path / "runs"), "--set", "recursivemas.text_team.max_tokens=3"]
    with pytest.raises(SystemExit) as end:
        app([*command, *more])
    assert end.value.code == 0
    out = capsys.readouterr().out.splitlines()
    table = next(i for i, line in enumerate(out) if line.startswith("\tright\t"))
    assert [line.split("\t")[0] for line in out[table + 1 : table + 4]] == ["ring", "text", "none"]
    assert any(line.startswith("against the text team: ") for line in out)
    assert any("round 2, expert" in line for line in out)
    assert (tmp_path / "runs/x/evals/text.jsonl").is_file()
