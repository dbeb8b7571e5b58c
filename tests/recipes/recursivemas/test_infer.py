"""Inference on tiny models: one text per question, its counts and its trace, in a run folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.errors import DataError
from agentrl.recipes.recursivemas.decode import answer_of, open_decoder
from agentrl.recipes.recursivemas.infer import UNTRAINED, answer_batch, counts_of, infer, trajectories
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.registry import Silence, VerbOptions
from agentrl.types import Task

TASKS = [Task("a", "How many apples are left?"), Task("b", "What is the capital of the north?")]


@pytest.fixture
def recipe(make_recipe, tmp_path):
    made = make_recipe(rounds=2)
    data = made.model_dump(mode="json", exclude_unset=True)
    data["run"] = {"steps": 0, "dir": str(tmp_path / "runs")}
    data["launch"] = {"threads": 1}
    data["agents"]["solver"]["sampling"] |= {"temperature": 0.0, "max_tokens": 6}
    return RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)


class Notes(Silence):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_infer_answers_a_question_and_shows_each_round(recipe):
    notes = Notes()
    result = infer(recipe, VerbOptions(question="How many apples are left?", progress=notes))
    assert notes.notes == [UNTRAINED]
    (answer,) = result["answers"]
    assert [(t["round"], t["agent"]) for t in answer["trace"]] == [
        (1, "planner"),
        (1, "critic"),
        (1, "solver"),
        (2, "planner"),
        (2, "critic"),
    ]
    assert result["links"]["trained"] is False
    assert answer["counts"]["latent_steps"] == 5 * 4
    assert answer["counts"]["rollouts"] == 5
    assert answer["counts"]["text_tokens"] == 6
    lines = (Path(result["run"]) / "trajectories/step_000000.jsonl").read_text("utf-8").splitlines()
    (turn,) = json.loads(lines[0])["turns"]
    assert len(turn["token_ids"]) == 6
    assert turn["agent"] == "solver"


def test_t27_the_seconds_of_the_parts_add_up_to_the_whole(recipe):
    seconds = infer(recipe, VerbOptions(question="How many apples are left?"))["seconds"]
    parts = seconds["thinking"] + seconds["decoding"]
    assert parts == pytest.approx(seconds["total"], rel=0.02, abs=0.05)
    assert seconds["load"] > 0


def test_infer_answers_a_file_in_batches_in_order(recipe, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [{"id": str(i), "question": f"What is {i} and {i}?"} for i in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    small = recipe.model_copy(update={"recursivemas": recipe.recursivemas.model_copy(update={"max_batch": 2})})
    whole = infer(recipe, VerbOptions(input_file=file))
    parts = infer(small, VerbOptions(input_file=file))
    assert [a["question"] for a in whole["answers"]] == [row["question"] for row in rows]
    assert [a["text"] for a in whole["answers"]] == [a["text"] for a in parts["answers"]]


def test_a_trace_shows_its_own_questions_norms_and_not_its_batchs(recipe, tmp_path):
    # a form whose last layer is no norm, which would make all blocks equally long
    forms = {"inner_form": "paper", "outer_form": "paper"}
    recipe = recipe.model_copy(update={"recursivemas": recipe.recursivemas.model_copy(update=forms)})
    file = tmp_path / "questions.jsonl"
    rows = [{"id": str(i), "question": text} for i, text in enumerate(("Why?", "How many apples are left? " * 9))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    together = [answer["trace"] for answer in infer(recipe, VerbOptions(input_file=file))["answers"]]
    alone = [infer(recipe, VerbOptions(question=row["question"]))["answers"][0]["trace"] for row in rows]
    for own, wanted in zip(together, alone, strict=True):
        for one, as_alone in zip(own, wanted, strict=True):
            assert one["sent_norm"] == pytest.approx(as_alone["sent_norm"], rel=1e-3)
            assert one["state_norm"] == pytest.approx(as_alone["state_norm"], rel=1e-3)
    first, second = (trace[0]["sent_norm"]["planner-critic"] for trace in alone)
    assert abs(first - second) > 0.02 * first


def test_t26_counts_match_hand_counts(recipe, make_system):
    _, loaded = make_system()

    async def run():
        async with open_decoder(recipe, loaded) as decoder:
            return await answer_batch(recipe, loaded, decoder, TASKS, "infer")

    out = asyncio.run(run())
    for row, scored in enumerate(trajectories(recipe, out)):
        counts = scored.trajectory.counts
        action = out.actions[row]
        length = len(action.request.prompt)
        prompts = sum(s.prompt_positions[row] for s in out.stages)
        assert counts["prompt_positions"] == prompts + length
        assert counts["reused_positions"] == sum(s.reused[row] for s in out.stages) > 0
        # every stage: its prompt less what it reused, and m - 1 fed back; the decode: its prompt and 5 of 6 tokens
        assert counts["positions"] == prompts - counts["reused_positions"] + 5 * 3 + length + 5
        assert counts == counts_of(out.stages, row, out.decodes[0][row])
        assert scored.trajectory.status == "truncated"


def test_t14_only_the_decoder_runs_a_head(recipe, make_system):
    _, loaded = make_system()
    heads = dict.fromkeys(loaded.system.agents, 0)
    hooks = []

    def counter(name):
        def count(*_):
            heads[name] += 1

        return count

    async def run():
        async with open_decoder(recipe, loaded) as decoder:
            for name, agent in loaded.system.agents.items():  # after the engine's own probes
                hooks.append(agent.backbone.model.get_output_embeddings().register_forward_hook(counter(name)))
            return await answer_batch(recipe, loaded, decoder, TASKS[:1], "infer")

    out = asyncio.run(run())
    for hook in hooks:
        hook.remove()
    assert heads == {"planner": 0, "critic": 0, "solver": len(out.actions[0].completion.ids)}


def test_t29_greedy_text_is_the_same_in_two_runs(recipe):
    options = VerbOptions(question="How many apples are left?")
    first, second = (infer(recipe, options)["answers"][0] for _ in range(2))
    assert first["text"] == second["text"]
    assert first["trace"] == second["trace"]


def test_a_question_that_does_not_fit_is_refused_by_its_id_before_anything_runs(recipe, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [{"id": "short", "question": "Why?"}, {"id": "long", "question": "apples " * 3000}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(DataError, match=r"question long: agent planner's prompt .* window of tiny-gemma3 is 2048"):
        infer(recipe, VerbOptions(input_file=file))


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("boxed", r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{cut", None),
        ("boxed", "no box", None),
        ("choice", r"thus \boxed{C}", "C"),
        ("choice", r"thus \boxed{\text{(B)}}", "B"),
        ("choice", r"thus \boxed{Copper}", None),
        ("choice", "A", None),
        ("code", "Try:\n```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2"),
        ("code", "```python\nx = 3", "x = 3"),
        ("code", "x = 3", None),
        ("short", "  Paris \n", "Paris"),
        ("short", "  ", None),
    ],
)
def test_answers_are_read_in_the_form_that_was_asked_for(kind, text, answer):
    assert answer_of(kind, text) == answer
