"""Real steps on tiny policies: separate weights, exact zeros, mini-batches, resume, learning (M-09..M-33, X-08)."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import DataError, RunFailedError
from agentrl.recipes import ranks as ranks_module
from agentrl.recipes.mappa import coaching
from agentrl.recipes.mappa import train as train_module
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.evaluate import evaluate, evaluation
from agentrl.recipes.mappa.infer import infer
from agentrl.recipes.mappa.rollout import rollout
from agentrl.recipes.mappa.train import train
from agentrl.recipes.registry import Silence, VerbOptions
from agentrl.types import Score
from agentrl.update.step import update_policy

PLUGINS = "mappa_train_test_plugins"
AGENT_METRICS = (
    *("coach_mean", "coach_std", "coach_missing", "tool_rate", "response_tokens", "truncated", "kl", "clip_fraction"),
)
METRICS = (
    *("step", "policy_version", "reward/mean", "reward/std", "reward/missing", "groups/zero_variance", "rollouts/ok"),
    *("rollouts/failed", "tokens/generated", "tokens/trained", "tokens/computed", "pack/fill", "loss", "grad_norm"),
    *("clip_fraction", "kl/ref", "kl/mismatch", "time/total", "time/rollout", "time/grade", "time/update", "time/sync"),
    *("mappa/failure_rate", "mappa/truncation_rate", "mappa/missing_scores", "mappa/kl_to_reference"),
)


def by_length(view):
    """Odd lengths are good: any policy has both, and no model is needed."""
    return float(len(view.action) % 2) * 10, "odd or even"


def only_second(view):
    return (float(len(view.action) % 2) * 10 if view.agent == "second" else 5.0), "the first agent's are all the same"


@pytest.fixture
def plugins(monkeypatch) -> str:
    module = ModuleType(PLUGINS)
    module.by_length, module.only_second, module.even_letters = by_length, only_second, even_letters
    monkeypatch.setitem(sys.modules, PLUGINS, module)
    return PLUGINS


@pytest.fixture
def recipe(tiny, plugins, monkeypatch, tmp_path):
    """A recipe of two agents with a policy each, six tokens an action; sections are merged over it."""
    monkeypatch.setenv("AGENTRL_HOME", str(tiny.parent.parent))

    def make(rule: str = "by_length", **sections: Any) -> MappaRecipe:
        tasks = tmp_path / "tasks.jsonl"
        for name, start in (("tasks", 0), ("held", 4)):
            lines = [{"id": f"q{i}", "question": f"Question {i}?", "answer": "north"} for i in range(start, start + 4)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        short = {"prompt": "Say.", "max_prompt_tokens": 400, "max_response_tokens": 60, "sampling": {"max_tokens": 6}}
        base: dict[str, Any] = {
            "method": "mappa",
            "policies": {n: {"name": "tiny-llama", "dtype": "float32"} for n in ("one", "two")},
            "agents": {
                "first": {"policy": "one", "role": "opens", **short},
                "second": {"policy": "two", "role": "closes", **short},
            },
            "coach": {"kind": "rules", "rules": f"{plugins}:{rule}"},
            "engine": {"kind": "hf", "deterministic": True},
            "data": {"path": str(tasks)},
            "mappa": {"mask_truncated": False},
            "optim": {"lr": 1e-3, "mini_batch": 4},
            "rollout": {"questions_per_step": 2, "group_size": 4},
            "launch": {"threads": 1},
            "run": {"steps": 2, "dir": str(tmp_path), "name": "run", "save_every": 1},
        }
        for key, value in sections.items():
            known = isinstance(value, dict) and isinstance(base.get(key), dict)
            base[key] = {**base[key], **value} if known else value
        return MappaRecipe.model_validate(base)

    return make


def even_letters(view):
    """The share of characters with an even code: about half of what random weights say, and easy to learn."""
    return 10.0 * sum(ord(c) % 2 == 0 for c in view.action) / max(1, len(view.action)), "even letters"


class Notes(Silence):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(recipe: MappaRecipe, **options: Any) -> SimpleNamespace:
    notes = Notes()
    summary = train(recipe, VerbOptions(progress=notes, **options))
    folder = Path(summary["run"])
    return SimpleNamespace(
        summary=summary,
        folder=folder,
        metrics=[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        notes=notes.notes,
    )


def weights(folder: Path, policy: str, step: int | None = None) -> str:
    name = "latest" if step is None else f"step_{step:06d}"
    return hashlib.sha256((folder / f"checkpoints/{name}/policies/{policy}/model.safetensors").read_bytes()).hexdigest()


def records(folder: Path, step: int) -> list[dict]:
    text = (folder / f"trajectories/step_{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_m17_m31_two_steps_record_what_the_contract_names_and_every_actions_score(recipe):
    done = run(recipe(run={"save_prompt_ids": True}))
    for metrics in done.metrics:
        names = {*METRICS, *(f"mappa/{agent}/{key}" for agent in ("first", "second") for key in AGENT_METRICS)}
        assert not names - set(metrics)
        assert metrics["kl/mismatch"] == pytest.approx(0.0, abs=1e-5)
    assert done.metrics[0]["kl/ref"] == 0.0
    assert done.metrics[1]["kl/ref"] != 0.0
    rows = records(done.folder, 1)
    assert len(rows) == 8
    for turn in (turn for row in rows for turn in row["turns"]):
        assert turn["score"] == float(len(turn["text"]) % 2) * 10
        assert turn["score_reason"] == "odd or even"
        lengths = {len(turn[k]) for k in ("token_ids", "logprobs", "old_logprobs", "loss_mask", "advantage")}
        assert lengths == {len(turn["token_ids"])}
        for logprob, old in zip(turn["logprobs"], turn["old_logprobs"], strict=True):
            assert old == pytest.approx(logprob, abs=1e-4)  # M-17


def accounted(metrics: dict) -> float:
    masked = sum(v for key, v in metrics.items() if key.startswith("tokens/masked/"))
    return metrics["tokens/trained"] + metrics["tokens/no_advantage"] + masked


def test_m31_every_sampled_token_is_trained_without_advantage_or_masked(recipe):
    one_agent = {"kl_coef": 0.0, "mask_truncated": False}
    some = run(recipe("only_second", mappa=one_agent, run={"steps": 1, "save_every": 0}))
    metrics = some.metrics[0]
    assert accounted(metrics) == metrics["tokens/generated"]
    assert metrics["tokens/trained"] > 0
    first = [t for row in records(some.folder, 1) for t in row["turns"] if t["agent"] == "first"]
    assert metrics["tokens/no_advantage"] >= sum(sum(turn["loss_mask"]) for turn in first) > 0


def test_m31_a_step_whose_actions_are_all_cut_has_its_metrics_all_the_same(recipe):
    done = run(recipe(mappa={"mask_truncated": True}, run={"steps": 1, "save_every": 0}))
    metrics = done.metrics[0]
    assert {t["finish_reason"] for row in records(done.folder, 1) for t in row["turns"]} == {"length"}
    assert not set(METRICS) - set(metrics)
    assert (metrics["tokens/trained"], metrics["tokens/no_advantage"], metrics["grad_norm"]) == (0, 0, None)
    assert metrics["tokens/masked/truncated"] == metrics["tokens/generated"] == accounted(metrics)
    assert done.summary["policy_version"] == {"one": 0, "two": 0}
    assert "step 1 trained nothing: tokens: truncated" in done.notes[0]


def never(view):
    raise KeyError("a fault of the rule")


def sometimes(view):
    if len(view.action) % 2:
        raise KeyError("a fault of the rule")
    return 4.0 + 6.0 * (len(view.action) % 4 == 0), "even"


def test_m05_m31_a_coach_that_grades_nothing_ends_the_run_and_missing_scores_are_counted_and_masked(recipe, plugins):
    sys.modules[plugins].never, sys.modules[plugins].sometimes = never, sometimes
    with pytest.raises(RunFailedError, match="coach: every reward of step 1 is missing: coach failed: KeyError") as end:
        run(recipe("never"))
    assert "--resume" in end.value.fix
    done = run(recipe("sometimes", run={"name": "some", "steps": 1}))
    missing = [t["score"] is None for row in records(done.folder, 1) for t in row["turns"]]
    assert 0 < sum(missing) < len(missing)
    assert done.metrics[0]["reward/missing"] == done.metrics[0]["mappa/missing_scores"] == sum(missing)
    assert any("of the scores are missing" in note for note in done.notes)
    for turn in (turn for row in records(done.folder, 1) for turn in row["turns"] if turn["score"] is None):
        assert set(turn["mask_reason"]) == {"reward_missing"}
        assert set(turn["advantage"]) <= {0.0, None}


def test_m19_the_engine_samples_the_next_rollout_from_the_updated_weights(recipe):
    done = run(recipe(optim={"lr": 3e-2}, run={"steps": 2}))
    before, after = (
        {(turn["agent"], turn["policy_version"]) for row in records(done.folder, step) for turn in row["turns"]}
        for step in (1, 2)
    )
    assert before == {("first", 0), ("second", 0)}
    assert all(version > 0 for _, version in after)
    pairs = [
        (old, behaviour)
        for row in records(done.folder, 2)
        for turn in row["turns"]
        for old, behaviour in zip(turn["old_logprobs"], turn["logprobs"], strict=True)
    ]
    assert max(abs(old - behaviour) for old, behaviour in pairs) < 1e-5
    assert abs(done.metrics[1]["kl/ref"]) > 1e-3  # the weights had moved by much more than that


def test_m14_one_rollout_per_question_trains(recipe):
    done = run(recipe(rollout={"questions_per_step": 4, "group_size": 1}, run={"steps": 1}))
    assert done.summary["policy_version"]["one"] > 0
    assert len(records(done.folder, 1)) == 4


def test_m26_failed_rollouts_are_counted_and_told_with_their_reason(recipe):
    made = recipe(rollout={"questions_per_step": 2, "group_size": 2}, run={"steps": 1})
    lines = [{"id": "short", "question": "What?", "answer": "x"}, {"id": "long", "question": "x" * 600, "answer": "x"}]
    Path(made.data.path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(made)
    assert done.metrics[0]["mappa/failure_rate"] == 0.5
    assert (done.metrics[0]["rollouts/ok"], done.metrics[0]["rollouts/failed"]) == (2, 2)
    failed = [row for row in records(done.folder, 1) if row["status"] == "failed"]
    assert {row["task_id"] for row in failed} == {"long"}
    assert all("more than max_prompt_tokens" in row["status_reason"] for row in failed)


def test_m18_separate_weights_and_an_agent_that_learns_nothing_keeps_its_bits(recipe):
    done = run(recipe("only_second", mappa={"kl_coef": 0.0, "mask_truncated": False}, run={"keep_last": 2}))
    assert weights(done.folder, "one", 1) == weights(done.folder, "one", 2)
    assert weights(done.folder, "two", 1) != weights(done.folder, "two", 2)
    assert done.summary["policy_version"]["one"] == 0
    assert done.summary["policy_version"]["two"] == 4


def test_m33_a_constant_coach_at_the_reference_gives_exactly_no_gradient(recipe):
    done = run(recipe(coach={"kind": "constant", "value": 7.0, "rules": None}))
    assert done.summary["policy_version"] == {"one": 0, "two": 0}
    assert all(m["grad_norm"] is None and m["mappa/updates"] == 0 for m in done.metrics)
    assert "step 1 trained nothing: tokens: no advantage" in done.notes[0]
    assert done.metrics[0]["groups/zero_variance"] == 2


def test_m09_one_reference_is_shared_and_stays_as_it_was(recipe, monkeypatch):
    kept: list[Any] = []
    make = ranks_module.make_policies

    def watched(*args: Any, **kwargs: Any) -> Any:
        policies, references = make(*args, **kwargs)
        scorer = references["one"]
        kept.extend((references, scorer, [p.detach().clone() for p in scorer.model.parameters()]))
        return policies, references

    monkeypatch.setattr(ranks_module, "make_policies", watched)
    run(recipe(run={"steps": 10, "save_every": 0}))
    references, scorer, before = kept
    assert references["two"] is scorer
    assert all(torch.equal(a, b) for a, b in zip(before, scorer.model.parameters(), strict=True))


def test_m25_every_sample_is_in_one_mini_batch_with_old_fixed_and_weights_of_its_own(recipe, monkeypatch):
    seen: list[Any] = []

    def watched(policy: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((policy.name, list(batch)))
        return update_policy(policy, batch, *args, **kwargs)

    monkeypatch.setattr(train_module, "update_policy", watched)
    done = run(recipe(optim={"mini_batch": 3}, run={"steps": 1}))
    assert [name for name, _ in seen] == ["one"] * 3 + ["two"] * 3
    assert sorted(len(batch) for _, batch in seen) == [2, 2, 3, 3, 3, 3]
    ids = [one.sample.id for _, batch in seen for one in batch]
    assert len(ids) == len(set(ids)) == 16
    for _, batch in seen:
        assert math.fsum(w for one in batch for w in one.weights) == pytest.approx(1.0)
        assert all(one.scored.old is not None for one in batch)
    assert done.summary["policy_version"] == {"one": 3, "two": 3}
    assert done.metrics[0]["tokens/trained"] == done.metrics[0]["tokens/generated"]


def test_m24_cut_completions_are_left_out_and_counted(recipe):
    done = run(recipe(mappa={"mask_truncated": True}, run={"steps": 1}))
    cut = [t["finish_reason"] == "length" for row in records(done.folder, 1) for t in row["turns"]]
    assert done.metrics[0]["mappa/truncation_rate"] == pytest.approx(sum(cut) / len(cut))
    for turn in (turn for row in records(done.folder, 1) for turn in row["turns"]):
        assert any(turn["loss_mask"]) == (turn["finish_reason"] != "length")


def test_x08_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(recipe):
    six = {"steps": 6, "save_every": 3}
    whole = run(recipe(run={**six, "name": "whole"}))
    run(recipe(run={**six, "name": "broken"}))
    broken = whole.folder.parent / "broken"
    # As after a kill in step 4: the checkpoint of step 3 is the newest.
    shutil.rmtree(broken / "checkpoints/step_000006")
    (broken / "checkpoints/latest").unlink()
    (broken / "checkpoints/latest").symlink_to("step_000003")
    again = run(recipe(run={**six, "name": "broken"}), resume=True)
    assert any("resumed after step 3" in note for note in again.notes)
    for policy in ("one", "two"):
        assert weights(again.folder, policy) == weights(whole.folder, policy)


def test_m12_m25_x08_ranks_share_scores_and_updates_and_their_number_may_change(recipe):
    steady = {"optim": {"lr": 1e-5, "mini_batch": 4, "schedule": "constant"}}
    one = run(recipe(run={"steps": 2, "name": "one"}, **steady))
    run(recipe(run={"steps": 1, "name": "two"}, **steady))
    two = run(recipe(run={"steps": 2, "name": "two"}, launch={"ranks": 2}, **steady), resume=True)
    assert two.summary["policy_version"] == one.summary["policy_version"]
    assert two.metrics[1]["mappa/kl_to_reference"] == pytest.approx(one.metrics[1]["mappa/kl_to_reference"], abs=1e-6)
    assert two.metrics[1]["mappa/kl_to_reference"] != 0.0
    for mine, theirs in zip(records(two.folder, 2), records(one.folder, 2), strict=True):
        for a, b in zip(mine["turns"], theirs["turns"], strict=True):
            assert a["token_ids"] == b["token_ids"]
            assert a["advantage"] == pytest.approx(b["advantage"], abs=1e-5)
    for policy in ("one", "two"):
        a, b = (load_file(d.folder / f"checkpoints/latest/policies/{policy}/model.safetensors") for d in (two, one))
        assert max(float((a[n] - b[n]).abs().max()) for n in b) < 1e-6


def test_m28_evaluation_is_graded_by_rules_k_times_without_a_coach_call(recipe, monkeypatch):
    asked: list[Any] = []
    score = coaching.Coaching._score

    async def watched(self: Any, view: Any, task: Any) -> Any:
        asked.append(view)
        return await score(self, view, task)

    monkeypatch.setattr(coaching.Coaching, "_score", watched)
    data = recipe().data.path
    held = {"data": {"path": data, "eval": {"path": data.replace("tasks", "held")}}, "reward": "exact_match"}
    trials = {"mappa": {"eval_trials": 3}, "run": {"eval_temperature": 1.0}}
    summary = evaluate(recipe(**held, **trials), VerbOptions())
    assert asked == []
    assert (summary["eval"]["n"], summary["eval"]["trials"], summary["eval"]["score"]) == (4, 12, 0.0)
    assert summary["eval"]["se"] == 0.0
    by_coach = {"mappa": {"eval_score": "coach"}, "run": {"name": "coached"}}
    summary = evaluate(recipe(**held, **by_coach), VerbOptions())
    assert len(asked) == 8
    assert 0.0 <= summary["eval"]["score"] <= 10.0
    assert summary["measured"] == "coach"


def test_m28_the_standard_error_is_over_problems():
    block = evaluation({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [None, 0.0]})
    assert (block["score"], block["trials"], block["n"]) == (0.5, 5, 3)
    assert block["se"] == pytest.approx(0.5 / math.sqrt(3))


def test_training_tells_the_rise_of_what_it_measures(recipe):
    data = recipe().data.path
    held = {
        "data": {"path": data, "eval": {"path": data.replace("tasks", "held")}},
        "mappa": {"eval_score": "coach", "mask_truncated": False},
    }
    done = run(recipe(**held, run={"steps": 1}))
    assert set(done.summary["rise"]) >= {"value", "low", "high"}
    assert done.summary["eval_before"]["n"] == 4
    assert done.metrics[0]["eval/score"] == done.summary["eval_after"]["score"]


def test_rollouts_are_recorded_with_scores_and_can_be_trained_on(recipe):
    rolled = rollout(recipe(run={"name": "roll"}), VerbOptions())
    assert rolled["rollouts"]["reward/missing"] == 0
    assert rolled["rollouts"]["mappa/second/actions"] == 8
    live = run(recipe(run={"name": "live", "steps": 1}))
    again = run(recipe(run={"name": "again"}), from_rollouts=Path(rolled["run"]))
    assert again.summary["steps"] == 1
    for policy in ("one", "two"):
        assert weights(again.folder, policy) == weights(live.folder, policy)


def test_infer_answers_a_question_with_every_agents_turn(recipe):
    result = infer(recipe(), VerbOptions(question="What is north?"))
    [answer] = result["answers"]
    assert answer["question"] == "What is north?"
    assert [turn["agent"] for turn in answer["turns"]] == ["first", "second"]


def test_m33_two_agents_learn_what_their_coach_wants_and_nothing_from_a_constant_one(recipe):
    data = recipe().data.path
    toy = {
        "data": {"path": data, "eval": {"path": data.replace("tasks", "held")}},
        "mappa": {"eval_score": "coach", "mask_truncated": False, "eval_trials": 16},
        "optim": {"lr": 1e-2, "mini_batch": 16, "schedule": "constant"},
        "rollout": {"questions_per_step": 4, "group_size": 8},
    }
    budget = {"steps": 24, "save_every": 0, "eval_temperature": 1.0}
    done = run(recipe("even_letters", **toy, run=budget))
    before, after = (done.summary[f"eval_{when}"]["score"] / 10 for when in ("before", "after"))
    assert 0.3 < before < 0.7
    assert after >= 0.9
    constant = {"kind": "constant", "value": 5.0, "rules": None}
    flat = run(recipe(**toy, coach=constant, run=budget | {"name": "flat", "steps": 2}))
    assert abs(flat.summary["rise"]["value"]) <= 0.5
    assert flat.summary["policy_version"] == {"one": 0, "two": 0}


def test_m32_a_held_out_question_that_is_trained_on_is_refused(recipe):
    data = recipe().data.path
    leaking = recipe(data={"path": data, "eval": {"path": data}}, mappa={"eval_score": "coach"})
    with pytest.raises(DataError, match="4 of its 4 questions are trained on too, 'q0' first"):
        run(leaking)


@pytest.mark.parametrize("credit", ["outcome", "grpo", "supervised"])
def test_x06_every_baseline_trains_on_the_same_trajectories_with_its_own_credit(recipe, credit, plugins):
    sys.modules[PLUGINS].odd_rollouts = OddRollouts
    made = recipe(reward=f"{plugins}:odd_rollouts", mappa={"credit": credit, "mask_truncated": False}, run={"steps": 1})
    done = run(made)
    process = run(recipe(run={"steps": 1, "name": "process"}))
    first, second = (records(one.folder, 1) for one in (done, process))
    assert [[t["token_ids"] for t in row["turns"]] for row in first] == [
        [t["token_ids"] for t in row["turns"]] for row in second
    ]
    assert [t["advantage"] for row in first for t in row["turns"]] != [
        t["advantage"] for row in second for t in row["turns"]
    ]
    assert done.summary["policy_version"]["one"] > 0
    assert done.metrics[0]["outcome/mean"] == 0.5
    if credit == "supervised":
        trained = {(row["g"] % 2, a) for row in first for t in row["turns"] for a in t["advantage"]}
        assert trained == {(1, 1.0), (0, 0.0)}


def with_agents(recipe: MappaRecipe, agents: Any, policies: Any) -> MappaRecipe:
    """The recipe with other policies, and other agents where they are given."""
    values = recipe.model_dump() | {"policies": policies}
    return MappaRecipe.model_validate(values | ({"agents": agents} if agents else {}))


class OddRollouts:
    async def score(self, task, trajectory):
        return Score(float(trajectory.g % 2))


def test_m18_agents_may_share_one_policy_or_speak_to_a_frozen_partner(recipe):
    model = {"name": "tiny-llama", "dtype": "float32"}
    agents = {name: agent.model_dump() | {"policy": "one"} for name, agent in recipe().agents.items()}
    shared = run(with_agents(recipe(optim={"part_stats_every": 1}), agents, {"one": model}))
    assert shared.metrics[0]["mappa/first/grad_norm"] > 0
    assert set(shared.summary["policy_version"]) == {"one"}
    assert shared.metrics[0]["samples/moving"] + shared.metrics[0]["samples/idle"] == 16
    frozen = with_agents(recipe(run={"name": "frozen"}), None, {"one": model, "two": model | {"mode": "frozen"}})
    done = run(frozen)
    assert done.summary["policy_version"]["one"] > 0
    assert done.summary["policy_version"]["two"] == 0
    for row in records(done.folder, 1):
        assert set(row["turns"][1]["mask_reason"]) == {"frozen"}
