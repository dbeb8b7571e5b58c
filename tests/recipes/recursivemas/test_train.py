"""Training links through the command line: what it writes, what it leaves alone, and what it learns."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from agentrl.config.shipped import shipped_links
from agentrl.data import load_tasks
from agentrl.recipes.recursivemas.evaluate import held_out_tasks
from agentrl.recipes.recursivemas.link_folders import file_in, links_folder
from agentrl.recipes.recursivemas.texts import with_random_answers
from agentrl.recipes.recursivemas.train import _tasks
from agentrl.recipes.recursivemas.training import _how, history
from agentrl.recipes.registry import VerbOptions, load_recipe, verb
from agentrl.types import Task
from agentrl.update.link_files import LinkSpec, load_link
from agentrl.update.link_header import read_metadata

RING = """\
method: recursivemas
policies:
  planner: {name: tiny-gemma3, mode: frozen, dtype: float32}
  critic: {name: tiny-llama-h96, mode: frozen, dtype: float32}
  solver: {name: tiny-qwen3, mode: frozen, dtype: float32}
engine: {kind: hf, deterministic: true}
data: {path: train.jsonl, eval: {path: held.jsonl}}
recursivemas:
  style: sequential_light
  answer: short
  rounds: 2
  latent_steps: 3
  train: {batch: 2}
agents: {solver: {sampling: {temperature: 0.0, max_tokens: 4}}}
optim: {lr: 0.002, warmup_steps: 1}
launch: {gpus: 0, threads: 1}
run: {steps: 2}
"""
WORDS = ("apple", "stone", "river", "glass", "paper", "cloud", "horse", "clock")
LINKS = {f"inner-{a}" for a in ("planner", "critic", "solver")} | {
    "outer-planner-critic",
    "outer-critic-solver",
    "outer-solver-planner",
}


@pytest.fixture
def ring(folder: Path) -> Path:
    """A user's folder with `ring.yaml`, twelve training questions and three held-out ones."""
    (folder / "ring.yaml").write_text(RING)
    rows = [
        {
            "id": f"q{i}",
            "question": f"What does box {i} hold?",
            "answer": WORDS[i % len(WORDS)],
            "plan": f"Open box {i}.",
            "refined_plan": f"Open box {i} and look.",
        }
        for i in range(15)
    ]
    for name, part in (("train", rows[:12]), ("held", rows[12:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{p.stem}.{k}": v for p in sorted(folder.glob("*.safetensors")) for k, v in load_file(p).items()}


def test_t17_a_run_trains_outer_links_alone_and_writes_what_the_contract_names(cli, ring):
    done = cli("recursivemas", "train", "ring.yaml", "--name", "r", "--json", sets=("run.save_every=1",))
    assert done.code == 0, done
    run = ring / "runs/r"
    steps = rows(run / "metrics.jsonl")
    assert [m["step"] for m in steps] == [1, 2]
    assert [m["policy_version"] for m in steps] == [1, 2]
    for m in steps:
        assert {"loss", "grad_norm", "lr", "tokens/trained", "tokens/computed", "time/total", "time/update"} <= set(m)
        own = {key.removeprefix("recursivemas/") for key in m if key.startswith("recursivemas/")}
        assert {"latent_steps", "text_tokens", "positions", "link_norm_ratio", "form", "stage"} <= own
        assert m["recursivemas/form"] == "rollout"
        assert m["recursivemas/latent_steps"] == 2 * 5 * 3
        assert all(m[f"recursivemas/grad_norm_round_{r}"] > 0 for r in (1, 2))
        assert m["recursivemas/link_norm_ratio"] > 1
    summary = json.loads((run / "summary.json").read_text())
    assert done.json["rise"] == summary["rise"]
    assert {"score", "n", "k", "low", "high", "items"} <= set(summary["eval_before"])
    assert (summary["eval_after"]["n"], summary["form"], summary["frozen"]) == (3, "rollout", True)
    assert set(summary["links"]["by_link"]) == LINKS
    assert sum(summary["links"]["by_link"].values()) == summary["links"]["parameters"]
    assert all(s["before"] == s["after"] for s in summary["backbones"].values())
    first, last = (weights(run / f"checkpoints/step_00000{n}/links") for n in (1, 2))
    moved = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert moved == {name for name in LINKS if name.startswith("outer")}
    with safe_open(run / "checkpoints/latest/links/outer-critic-solver.safetensors", framework="pt") as file:
        how = json.loads(file.metadata()["training"])
    assert how == {"stage": "outer", "form": "rollout", "rounds": 2, "latent_steps": 3, "steps": 2, "seed": 42}


def test_positions_count_what_was_computed_and_not_what_was_remembered(cli, ring):
    sets = ("recursivemas.train.stage=inner", "recursivemas.train.batch=12", "data.eval.path=null")
    sets += ("engine.deterministic=false",)
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "2", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    first, again = rows(ring / "runs/r/metrics.jsonl")
    assert first["tokens/computed"] == first["recursivemas/positions"] > first["recursivemas/text_tokens"] > 0
    assert again["tokens/computed"] == 0
    assert again["recursivemas/text_tokens"] == first["recursivemas/text_tokens"]


@pytest.mark.parametrize("form", ["first_step", "teacher_forced"])
def test_every_form_of_training_is_named_in_metrics_summary_and_files(cli, ring, form):
    sets = (f"recursivemas.train.form={form}",)
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    assert done.json["form"] == form
    assert rows(ring / "runs/r/metrics.jsonl")[0]["recursivemas/form"] == form
    assert done.json["links"]["training"]["outer-planner-critic"]["form"] == form
    assert done.json["links"]["training"]["inner-planner"] is None


def test_t18_the_inner_stage_raises_the_held_out_cosine_and_moves_inner_links_alone(cli, ring):
    sets = ("recursivemas.train.stage=inner", "recursivemas.train.batch=6", "optim.lr=0.01", "run.save_every=1")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "12", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    assert done.json["rise"]["low"] > 0.1
    assert done.json["inner"]["texts"] == {"planner": "plan", "critic": "refined_plan", "solver": "answer"}
    assert "form" not in done.json
    steps = rows(ring / "runs/r/metrics.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {f"recursivemas/{agent}/loss" for agent in ("planner", "critic", "solver")} <= set(steps[0])
    first, last = (weights(ring / f"runs/r/checkpoints/step_0000{n}/links") for n in (11, 12))
    moved = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert moved == {name for name in LINKS if name.startswith("inner")}


def test_a_link_that_no_round_goes_through_stays_untrained_and_is_refused_where_it_is_used(cli, ring):
    sets = ("recursivemas.train.stage=both", "recursivemas.train.inner_steps=1", "recursivemas.rounds=1")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "2", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    assert {name for name, how in done.json["links"]["training"].items() if how is None} == {"outer-solver-planner"}
    assert done.json["links"]["trained"] is True
    asked = ("recursivemas", "infer", "ring.yaml", "--links", "r", "--question", "What?", "--rounds")
    assert cli(*asked, "1").code == 0
    refused = cli(*asked, "2")
    assert refused.code == 2
    assert "outer-solver-planner hold random weights" in refused.err


def test_both_stages_in_one_run_make_links_that_need_no_leave(cli, ring):
    sets = ("recursivemas.train.stage=both", "recursivemas.train.inner_steps=1")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "2", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    assert [m["recursivemas/stage"] for m in rows(ring / "runs/r/metrics.jsonl")] == ["inner", "outer"]
    # a stage has a schedule of its own: its first step is warm-up again
    assert [m["lr"] for m in rows(ring / "runs/r/metrics.jsonl")] == [0.002, 0.002]
    assert done.json["links"]["trained"] is True
    asked = cli("recursivemas", "infer", "ring.yaml", "--links", "r", "--rounds", "3", "--question", "What?")
    assert asked.code == 0, asked
    lines = asked.out.splitlines()
    head = lines.index("round\tagent\tsteps\tpositions\treused\tstate norm\tsent, norm")
    told = [line.split("\t")[:3] for line in lines[head + 1 : head + 9]]
    ring_of = ("planner", "critic", "solver")
    assert told == [[str(r), a, "3"] for r in (1, 2, 3) for a in ring_of if (r, a) != (3, "solver")]
    assert "text tokens\tlatent steps\trollouts\tprompt positions\treused positions\tpositions" in lines
    sample = cli("recursivemas", "infer", "ring.yaml", "--checkpoint", "r", "--json")
    assert sample.json["answers"][0]["question"] == "What does box 12 hold?"


@pytest.mark.parametrize("hops", [0, 1])
def test_t20_parts_of_a_batch_add_up_to_the_batch(ring, hops):
    moved = []
    for number, micro in enumerate(("null", "1")):
        sets = [
            f"recursivemas.train.micro_batch={micro}",
            f"recursivemas.train.hop_steps={hops}",
            *("recursivemas.train.batch=4", "run.steps=1", "data.eval.path=null", f"run.name=r{number}"),
        ]
        verb("recursivemas", "train")(load_recipe("ring.yaml", sets).tree, VerbOptions())
        [step] = rows(ring / f"runs/r{number}/metrics.jsonl")
        moved.append((step, load_file(ring / f"runs/r{number}/checkpoints/latest/trainer/links_moments.safetensors")))
    (whole, first), (parts, second) = moved
    hop_losses = ("recursivemas/planner/loss", "recursivemas/critic/loss") if hops else ()
    for key in ("loss", "grad_norm", "recursivemas/grad_norm_round_1", "recursivemas/grad_norm_round_2", *hop_losses):
        assert parts[key] == pytest.approx(whole[key], rel=1e-5)
    for key in ("recursivemas/latent_steps", "recursivemas/text_tokens", "recursivemas/positions"):
        assert parts[key] == whole[key]
    # after one step the first moment is the clipped gradient, a tenth of it
    a, b = (torch.cat([v.flatten() for k, v in m.items() if k.startswith("exp_avg.")]) for m in (first, second))
    assert ((a - b).norm() / a.norm()).item() < 1e-5


# What is held out


def test_t25_training_evaluates_the_very_questions_that_eval_does(ring):
    """Options of a choice benchmark are shuffled by the run's seed in both."""
    stems = [f"Which of them lies in drawer {i}?" for i in range(6)]
    held = [
        {"Question": stem, "Correct Answer": "a", **{f"Incorrect Answer {i}": "xyz"[i - 1] for i in (1, 2, 3)}}
        for stem in stems
    ]
    (ring / "gpqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    sets = ["data.eval.path=gpqa.jsonl", "data.eval.format=gpqa_diamond", "recursivemas.answer=choice", "run.seed=5"]
    recipe = load_recipe("ring.yaml", sets).tree
    _, held_out = _tasks(recipe)
    assert [(t.question, t.references) for t in held_out] == [
        (t.question, t.references) for t in held_out_tasks(recipe)
    ]
    unseeded = load_tasks(recipe.data.eval)
    assert [t.question for t in held_out] != [t.question for t in unseeded]


def test_t25_a_held_out_question_without_an_answer_as_text_is_graded_and_has_no_loss(cli, ring):
    held = {"prompt": "Double x.", "test_list": ["assert f(1) == 2"], "test": "assert f(1) == 2", "task_id": 1}
    (ring / "held.jsonl").write_text(json.dumps(held) + "\n")
    sets = ("data.eval.format=mbpp_plus", "recursivemas.answer=code")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    assert done.json["held_out_without_answer"] == 1
    assert done.json["held_out_loss_as_used"] == {"before": None, "after": None}
    assert (done.json["eval_after"]["n"], done.json["eval_after"]["score"]) == (1, 0.0)
    assert rows(ring / "runs/r/metrics.jsonl")[0]["eval/loss_as_used"] is None


def test_held_out_questions_need_no_texts_that_nothing_is_measured_on(cli, ring):
    lines = rows(ring / "held.jsonl")
    (ring / "held.jsonl").write_text(
        "".join(json.dumps({k: row[k] for k in ("id", "question", "answer")}) + "\n" for row in lines)
    )
    sets = ("recursivemas.train.form=teacher_forced",)
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", "--json", sets=sets)
    assert done.code == 0, done
    assert done.json["held_out_loss_as_used"]["after"] > 0


@pytest.mark.parametrize("stage", ["inner", "outer"])
def test_a_known_text_that_the_window_does_not_hold_is_refused_before_step_1(cli, ring, stage):
    """The question is short, and forty others are longer."""
    asked = (f"What does box {i} hold? " + "Look. " * 20 for i in range(40))
    lines = [{"id": f"q{i}", "question": question, "answer": "apple"} for i, question in enumerate(asked)]
    lines.append({"id": "long", "question": "What?", "answer": "many words " * 1500})
    (ring / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sets = (f"recursivemas.train.stage={stage}", "recursivemas.train.max_text_tokens=9000", "data.eval.path=null")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", sets=sets)
    done.two_lines(4, "data.path: question long: agent", "max_text_tokens")
    assert not (ring / "runs/r/metrics.jsonl").exists()


def test_a_hops_text_that_the_window_does_not_hold_is_refused_before_step_1(cli, ring):
    lines = rows(ring / "train.jsonl")
    lines[3]["refined_plan"] = "many words " * 1500
    (ring / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sets = ("recursivemas.train.hop_steps=1", "recursivemas.train.max_text_tokens=9000")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", sets=sets)
    done.two_lines(4, "data.path: question q3: agent critic", "max_text_tokens")
    assert not (ring / "runs/r/metrics.jsonl").exists()


def test_hops_are_trained_in_the_first_outer_steps_and_no_later(ring):
    moved = []
    for hops in (0, 1):
        sets = (
            *("recursivemas.train.stage=both", "recursivemas.train.inner_steps=1", "data.eval.path=null"),
            *(f"recursivemas.train.hop_steps={hops}", "run.steps=3", f"run.name=h{hops}"),
        )
        verb("recursivemas", "train")(load_recipe("ring.yaml", sets).tree, VerbOptions())
        steps = rows(ring / f"runs/h{hops}/metrics.jsonl")
        told = [[a for a in ("planner", "critic") if f"recursivemas/{a}/loss" in m] for m in steps]
        assert told == [["planner", "critic"], ["planner", "critic"] if hops else [], []]
        moved.append((steps, weights(ring / f"runs/h{hops}/checkpoints/latest/links")))
    (plain, without), (beside, trained) = moved
    # the answer's loss of the first outer step is the same, what is learned from it is not
    assert beside[1]["loss"] == pytest.approx(plain[1]["loss"], rel=1e-6)
    assert beside[1]["grad_norm"] != pytest.approx(plain[1]["grad_norm"], rel=1e-2)
    assert any(not torch.equal(trained[key], without[key]) for key in without if key.startswith("outer-planner-critic"))


def test_a_hop_without_a_text_of_its_own_is_refused(cli, ring):
    lines = [{key: row[key] for key in ("id", "question", "answer")} for row in rows(ring / "train.jsonl")]
    (ring / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    sets = ("recursivemas.train.hop_steps=1",)
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", sets=sets)
    done.two_lines(4, "hop_steps: what planner says in a hop is not known", "recursivemas.train.targets.planner")
    given = (*sets, "recursivemas.train.targets={planner: answer, critic: answer}", "data.eval.path=null")
    assert cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r", sets=given).code == 0


# Resume

DIES = """
import os
import signal

import agentrl.run
from agentrl.grading.qa import ExactMatch
from agentrl.recipes.recursivemas import train, training

POINT, _, STEP = os.environ.get("FAULT", "").partition(":")


def before(module, name, dies):
    real = vars(module)[name]

    def instead(*args, **kwargs):
        if dies(real, *args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, name, instead)


def torn(real, links, folder, *rest):
    if f"step_{int(STEP):06d}" not in str(folder):
        return False
    real(links, folder, *rest)
    path = folder / "outer-critic-solver.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return True


def faulty():
    if POINT == "step":
        before(train, "outer_step" if int(STEP) > 2 else "inner_step", lambda real, t, tasks, step: step == int(STEP))
    if POINT == "record":
        before(train, "record", lambda real, t, step, *rest: step == int(STEP))
    if POINT == "save":
        before(training, "save_links", torn)
    if POINT == "saved":
        before(agentrl.run, "_point", lambda real, link, name: name == f"step_{int(STEP):06d}")
    return ExactMatch()
"""
SETS = (
    "reward=dies:faulty",
    "recursivemas.train.stage=both",
    "recursivemas.train.inner_steps=2",
    "run.save_every=1",
    "run.eval_every=2",
)


def content(path: Path) -> object:
    """The bytes of a file; of a link file what it holds, since safetensors writes metadata in any order."""
    if path.name == "manifest.json" or path.parent.name != "links":
        return path.read_bytes()
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {k: file.get_tensor(k).numpy().tobytes() for k in file.keys()}  # noqa: SIM118


def _train(drive, name, fault="", *args):
    words = ("recursivemas", "train", "ring.yaml", "--steps", "5", "--name", name, *args)
    return drive(*words, sets=SETS, env={"FAULT": fault})


def test_t30_a_run_killed_in_both_stages_equals_the_unbroken_one_bit_for_bit(drive, ring):
    (ring / "dies.py").write_text(DIES)
    whole = _train(drive, "whole")
    assert whole.wait() == 0, whole.log
    for number, fault in enumerate(("step:2", "save:3", "saved:4")):
        driver = _train(drive, "killed", fault, *(["--resume"] if number else []))
        assert driver.wait() == -signal.SIGKILL, (fault, driver.log)
    driver = _train(drive, "killed", "", "--resume")
    assert driver.wait() == 0, driver.log
    assert "resumed after step 4" in driver.log
    runs = [ring / "runs" / name for name in ("whole", "killed")]
    told = [
        [{k: v for k, v in m.items() if not k.startswith("time/")} for m in rows(r / "metrics.jsonl")] for r in runs
    ]
    assert told[0] == told[1]
    files = [
        {str(p.relative_to(r)): content(p) for k in ("checkpoints", "evals") for p in (r / k).rglob("*") if p.is_file()}
        for r in runs
    ]
    assert files[0] == files[1]
    assert [m["policy_version"] for m in told[0]] == [1, 2, 3, 4, 5]
    after = [json.loads((r / "summary.json").read_text()) for r in runs]
    assert after[0]["eval_before"] == after[1]["eval_before"]
    assert after[0]["links"] == after[1]["links"]
    # nothing is left to do
    summary = (runs[1] / "summary.json").read_bytes()
    again = _train(drive, "killed", "", "--resume")
    assert again.wait() == 0, again.log
    assert (runs[1] / "summary.json").read_bytes() == summary


# The leak probe


def _probe(ring, form, steps, more=""):
    sets = [
        f"recursivemas.train={{leak_probe: true, form: {form}, batch: 4, checkpointed: false{more}}}",
        *(f"run.steps={steps}", f"run.name={form}", "optim.lr=0.01", "optim.part_stats_every=0"),
    ]
    return verb("recursivemas", "train")(load_recipe("ring.yaml", sets).tree, VerbOptions())


def test_t19_random_answers_are_learned_by_no_faithful_training(ring):
    result = _probe(ring, "rollout", 8)
    found = result["leak_probe"]
    assert found["leaks"] is False
    assert found["gap_low"] < 0.0 < found["gap_high"]
    assert result["held_out_loss_as_used"]["after"] == pytest.approx(found["as_trained"], rel=1e-4)


def test_t19_the_probe_finds_a_scheme_in_which_agents_read_the_answer(ring):
    result = _probe(ring, "teacher_forced", 16, ", targets: {planner: answer, critic: answer}")
    found = result["leak_probe"]
    assert found["leaks"] is True
    assert found["gap_low"] > 0.2
    # where nobody has read the answer, nothing was learned
    assert result["held_out_loss_as_used"]["after"] > found["as_trained"] + 0.3


def test_t19_questions_that_drew_equal_answers_are_no_pair(ring):
    lines = [{**row, "answer": "apple"} for row in rows(ring / "train.jsonl")]
    (ring / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = _probe(ring, "rollout", 1)["leak_probe"]
    assert (found["pairs"], found["other"], found["gap"], found["leaks"]) == (0, None, None, None)
    assert found["as_trained"] > 0


def test_t19_random_answers_come_from_the_set_and_from_no_question():
    pool = [Task(str(i), "q", (word,)) for i, word in enumerate(WORDS)]
    tasks = [Task(str(i), "q", ("old",)) for i in range(400)]
    drawn = [task.references[0] for task in with_random_answers(tasks, pool, "0")]
    assert {drawn.count(word) for word in WORDS} <= set(range(25, 76))
    assert drawn == [task.references[0] for task in with_random_answers(tasks, pool, "0")]
    assert drawn != [task.references[0] for task in with_random_answers(tasks, pool, "1")]


# Links: start, export, ship


def test_a_run_may_begin_with_the_links_of_another(cli, ring):
    sets = ("recursivemas.train.stage=inner", "data.eval.path=null")
    assert cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "a", sets=sets).code == 0
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "b", "--links", "a", "--json")
    assert done.code == 0, done
    assert done.json["links"]["trained"] is True
    inner = [weights(ring / f"runs/{name}/checkpoints/latest/links") for name in ("a", "b")]
    assert all(torch.equal(inner[0][k], inner[1][k]) for k in inner[0] if k.startswith("inner"))


def test_a_start_is_recorded_for_the_links_that_had_it_alone(cli, ring):
    given = ("recursivemas.train.stage=inner", "data.eval.path=null")
    assert cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "a", sets=given).code == 0
    sets = ("recursivemas.train.start=matched", "recursivemas.train.inner_too=true", "data.eval.path=null")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "b", "--links", "a", "--json", sets=sets)
    assert done.code == 0, done
    assert done.json["start"] == "matched"
    assert set(done.json["started"]) == {name for name in LINKS if name.startswith("outer")}
    told = done.json["links"]["training"]
    assert {name for name, how in told.items() if how.get("start") == "matched"} == set(done.json["started"])
    again = cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "c", "--links", "b", sets=sets)
    again.two_lines(2, "start: matched has no effect", "leave it out")


def test_a_link_that_is_trained_again_says_by_what_it_was_trained_before(cli, ring):
    both = ("recursivemas.train.stage=both", "recursivemas.train.inner_steps=1", "recursivemas.train.start=matched")
    sets = ("recursivemas.train.inner_too=true", "data.eval.path=null", "run.save_every=1")
    done = cli("recursivemas", "train", "ring.yaml", "--steps", "2", "--name", "a", "--json", sets=(*both, *sets))
    assert done.code == 0, done
    told = done.json["links"]["training"]
    outer = {"stage": "outer", "form": "rollout", "rounds": 2, "latent_steps": 3, "seed": 42}
    inner = {"stage": "inner", "steps": 1, "seed": 42, "start": "matched"}
    assert told["inner-critic"] == {**outer, "steps": 2, "before": [inner]}
    assert told["outer-planner-critic"] == {**outer, "steps": 2, "start": "matched"}
    # a run that begins with those links adds itself once, however often it is broken off
    for steps, more in (("1", ("--links", "a")), ("3", ("--resume", "--links", "a"))):
        done = cli("recursivemas", "train", "ring.yaml", "--steps", steps, "--name", "b", "--json", *more, sets=sets)
        assert done.code == 0, done
        told = done.json["links"]["training"]
        last = {**outer, "steps": int(steps)}
        assert told["inner-critic"] == {**last, "before": [inner, {**outer, "steps": 2}]}
        assert told["outer-planner-critic"] == {**last, "before": [{**outer, "steps": 2, "start": "matched"}]}
    assert read_metadata(file_in(links_folder("b", "runs"), "inner-critic"))["training"] == told["inner-critic"]
    assert cli("recursivemas", "infer", "ring.yaml", "--links", "b", "--question", "What?").code == 0


@pytest.mark.parametrize("key", ["hop_steps", "one_round_steps"])
def test_a_link_says_how_many_steps_went_before_the_whole_recursion(ring, key):
    told = [_how(load_recipe("ring.yaml", [f"recursivemas.train.{key}={n}"]).tree, "outer", 2) for n in (0, 1)]
    assert told[1] == {**told[0], key: 1}
    assert key not in told[0]


def test_links_that_say_one_stage_alone_are_read_as_before():
    folder = shipped_links()["embedded-ring"]
    about = json.loads((folder / "provenance.json").read_text())
    for name, how in about["links"].items():
        found = read_metadata(file_in(folder, name))
        spec = LinkSpec(**{key: found[key] for key in LinkSpec.__dataclass_fields__})
        assert load_link(file_in(folder, name), spec).dim_in == spec.dim_in
        assert history(found["training"]) == [how]


def test_t5_exported_links_come_back_bit_for_bit_in_both_layouts(cli, ring):
    assert cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r").code == 0
    saved = weights(ring / "runs/r/checkpoints/latest/links")
    assert cli("export", "r", "plain").code == 0
    assert {k: v.tolist() for k, v in weights(ring / "plain").items()} == {k: v.tolist() for k, v in saved.items()}
    about = json.loads((ring / "plain/provenance.json").read_text())
    assert (about["seed"], about["steps"], about["form"]) == (42, 1, "rollout")
    assert about["eval_after"]["n"] == 3
    assert "items" not in about["eval_after"]
    assert cli("export", "r", "official", "--official").code == 0
    inner = ", ".join(f"{a}: official/{a}" for a in ("planner", "critic", "solver"))
    official = f"recursivemas.official={{outer: official/outer, inner: {{{inner}}}}}"
    again = cli("recursivemas", "infer", "ring.yaml", "--question", "What?", "--json", sets=(official,))
    ours = cli(
        "recursivemas", "infer", "ring.yaml", "--question", "What?", "--json", "--links", "r", "--allow-untrained"
    )
    assert again.code == ours.code == 0, again
    assert again.json["answers"][0]["text"] == ours.json["answers"][0]["text"]
    assert again.json["answers"][0]["trace"] == ours.json["answers"][0]["trace"]
    for agent in ("planner", "critic", "solver"):
        for name, tensor in torch.load(ring / f"official/{agent}/adapter(math).pt", weights_only=True).items():
            assert torch.equal(tensor, saved[f"inner-{agent}.{name}"])
    cli("export", "r", "plain").two_lines(2, "plain holds something already", "new folder")
    cli("export", "r", "x", "--policy", "planner").two_lines(2, "its models are frozen", "leave --policy out")
    # stored small: half the bytes, and the values are those of bfloat16
    assert cli("export", "r", "small", "--dtype", "bfloat16").code == 0
    small = weights(ring / "small")
    assert all(torch.equal(small[k], v.to(torch.bfloat16)) for k, v in saved.items())


def test_shipped_links_are_found_by_name(ring, monkeypatch):
    shipped = ring / "shipped/links/embedded-ring"
    shipped.mkdir(parents=True)
    monkeypatch.setattr("agentrl.config.shipped.shipped_folder", lambda: ring / "shipped")
    assert links_folder("embedded-ring", "runs") == shipped


def test_an_interrupted_run_finishes_its_step_saves_and_goes_on(drive, cli, ring):
    driver = drive("recursivemas", "train", "ring.yaml", "--steps", "300", "--name", "r", sets=("data.eval.limit=1",))
    driver.wait_for("runs/r/metrics.jsonl")
    driver.signal(signal.SIGINT)
    assert driver.wait() == 130, driver.log
    assert "stopping after this step" in driver.log
    summary = json.loads((ring / "runs/r/summary.json").read_text())
    last = rows(ring / "runs/r/metrics.jsonl")[-1]["step"]
    assert (summary["status"], summary["steps"]) == ("interrupted", last)
    assert last < 300
    words = ("--steps", str(last + 1), "--name", "r", "--resume")
    again = cli("recursivemas", "train", "ring.yaml", *words, sets=("data.eval.limit=1",))
    assert again.code == 0, again
    assert [m["step"] for m in rows(ring / "runs/r/metrics.jsonl")] == list(range(1, last + 2))


def test_links_of_a_run_whose_keys_are_not_known_any_more_can_be_exported(cli, ring):
    assert cli("recursivemas", "train", "ring.yaml", "--steps", "1", "--name", "r").code == 0
    config = ring / "runs/r/config.yaml"
    config.write_text(config.read_text().replace("    stage:", "    gone: 1\n    stage:", 1))
    assert cli("export", "r", "plain").code == 0
    assert len(weights(ring / "plain")) == len(weights(ring / "runs/r/checkpoints/latest/links"))
    cli("export", "r", "official", "--official").two_lines(2, "recursivemas.train.gone: unknown key")
    assert not (ring / "official").exists()
