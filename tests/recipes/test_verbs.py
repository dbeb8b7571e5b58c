"""infer, rollout, train --from-rollouts, export and check --show-sample, each through the command line."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")
SIZE = ("rollout.questions_per_step=4", "rollout.group_size=6")
SETS = (*TINY, *SIZE, "reward=parity_reward:parity", "data.eval.limit=2")


def weights(run: Path) -> str:
    return hashlib.sha256((run / "checkpoints/latest/policies/policy/model.safetensors").read_bytes()).hexdigest()


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# infer


def test_infer_answers_one_question_and_shows_who_said_what(cli, folder):
    done = cli("mars", "infer", "mars-embedded", "--question", "Where is the owl?", "--name", "one", sets=TINY)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert "question: Where is the owl?" in lines
    assert any(line.startswith("  system2: ") for line in lines)
    assert lines[-1].startswith("answer: ")
    [record] = rows(folder / "runs/one/trajectories/step_000000.jsonl")
    assert (record["reward"], record["reward_missing_reason"]) == (None, "not graded")


def test_infer_answers_a_file_in_its_order_whether_or_not_it_holds_answers(cli, folder):
    (folder / "q.jsonl").write_text(
        '{"question": "Where is the owl?", "answer": "Rome"}\n{"question": "And the fox?"}\n'
    )
    done = cli("mars", "infer", "mars-embedded", "--input", "q.jsonl", "--json", sets=TINY)
    assert done.code == 0, done
    answers = done.json["answers"]
    assert [answer["question"] for answer in answers] == ["Where is the owl?", "And the fox?"]
    assert all(answer["turns"] and answer["status"] in ("ok", "turn_limit", "truncated") for answer in answers)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"question": "a"}\n{"question": \n', "q.jsonl:2: broken JSON"),
        ('{"prompt": "a"}\n', "needed question"),
        ('{"question": ""}\n', "q.jsonl:1: 'question' is not a question"),
        ("", "q.jsonl: the file is empty"),
    ],
)
def test_infer_names_the_line_of_a_bad_input_file(cli, folder, text, cause):
    (folder / "q.jsonl").write_text(text)
    done = cli("mars", "infer", "mars-embedded", "--input", "q.jsonl", sets=TINY)
    done.two_lines(4, cause)
    assert not (folder / "runs").exists()


def test_a_checkpoint_that_is_not_there_leaves_no_run_folder_behind(cli, folder):
    (folder / "runs/r/checkpoints").mkdir(parents=True)
    (folder / "runs/r@3/checkpoints").mkdir(parents=True)
    ask = ("--question", "Where is the owl?")
    runs = [("mars", verb, "mars-embedded", "model") for verb in ("eval", "rollout", "infer", "train")]
    runs += [("mappa", verb, "smoke/mappa", "policies.answerer") for verb in ("eval", "rollout", "infer", "train")]
    for method, verb, recipe, key in runs:
        sets = (f"{key}.name=tiny-llama", f"{key}.checkpoint=r@99", "launch.threads=1")
        done = cli(method, verb, recipe, *(ask if verb == "infer" else ()), "--name", "new", sets=sets)
        done.two_lines(3, "runs/r has no whole checkpoint of step 99", "name another step")
        assert not (folder / "runs/new").exists()
    # a run of that very name comes before the step of another run
    done = cli("mars", "eval", "mars-embedded", "--checkpoint", "r@3", sets=TINY)
    done.two_lines(3, "runs/r@3 has no whole checkpoint")
    taken = cli("mars", "infer", "mars-embedded", *ask, "--name", "r", sets=TINY)
    taken.two_lines(2, "run 'r' exists already", "choose another --name")
    assert "--resume" not in taken.err


# rollout and --from-rollouts


def test_training_on_recorded_rollouts_gives_the_weights_of_the_run_that_recorded_them(cli, folder):
    recording = (*SETS, "run.save_prompt_ids=true")
    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "live", sets=recording).code == 0
    replay = ("mars", "train", "mars-embedded", "--smoke", "--from-rollouts", "runs/live", "--name")
    done = cli(*replay, "replay", sets=SETS)
    assert done.code == 0, done
    runs = folder / "runs"
    assert weights(runs / "replay") == weights(runs / "live")
    assert [m["policy_version"] for m in rows(runs / "replay/metrics.jsonl")] == [1, 2]
    assert [m["rollouts/reused"] for m in rows(runs / "replay/metrics.jsonl")] == [24, 24]

    step = runs / "live/trajectories/step_000002.jsonl"
    lines = rows(step)
    lines[0]["turns"][0]["text"] += " and more"
    step.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cli(*replay, "tokens", sets=SETS).two_lines(4, "are not those of tiny-llama")
    step.write_text((runs / "live/trajectories/step_000001.jsonl").read_text())
    cli(*replay, "stale", sets=SETS).two_lines(4, "was sampled by version 0 of policy 'policy', which is at version 1")


def test_rollout_records_one_step_that_can_be_trained_on(cli, folder):
    done = cli("mars", "rollout", "mars-embedded", "--smoke", "--name", "roll", "--json", sets=SETS)
    assert done.code == 0, done
    assert done.json["rollouts"]["rollouts/ok"] == 24
    records = rows(folder / "runs/roll/trajectories/step_000001.jsonl")
    assert len(records) == 24
    (folder / "twice").mkdir()
    twice = [json.dumps(record) + "\n" for record in (records[0], records[1], records[0])]
    (folder / "twice/step_000001.jsonl").write_text("".join(twice))
    done = cli("mars", "train", "mars-embedded", "--smoke", "--from-rollouts", "twice", sets=SETS)
    done.two_lines(4, f"twice/step_000001.jsonl:3: the trajectory {records[0]['id']!r} stands there twice")
    assert all(turn["prompt_ids"] for record in records for turn in record["turns"])
    done = cli("mars", "train", "mars-embedded", "--smoke", "--from-rollouts", "runs/roll", "--json", sets=SETS)
    assert done.code == 0, done
    assert (done.json["steps"], done.json["policy_version"]) == (1, {"policy": 1})


def test_rollouts_that_cannot_be_trained_on_are_refused(cli, folder):
    train = ("mars", "train", "mars-embedded", "--smoke", "--from-rollouts")
    (folder / "empty").mkdir()
    cli(*train, "empty", sets=SETS).two_lines(4, "empty holds no step_NNNNNN.jsonl")
    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "bare", "--steps", "1", sets=SETS).code == 0
    bare = cli(*train, "runs/bare", sets=SETS)
    bare.two_lines(4, "runs/bare/trajectories/step_000001.jsonl:1: trajectory ", "run.save_prompt_ids=true")
    assert "lacks what a rollout needs: 'prompt_ids'" in bare.err
    told = "rollout.group_size, rollout.questions_per_step, data and reward are taken from the recording"
    assert told in bare.err
    (folder / "empty" / "step_000001.jsonl").write_text('{"id": \n')
    cli(*train, "empty", sets=SETS).two_lines(4, "step_000001.jsonl:1: broken JSON")
    (folder / "empty" / "step_000001.jsonl").write_bytes(b'{"id": "\xff"}\n')
    cli(*train, "empty", sets=SETS).two_lines(4, "empty/step_000001.jsonl: not UTF-8 text (byte 8)")
    (folder / "empty" / "step_000001.jsonl").write_text("[1]\n")
    cli(*train, "empty", sets=SETS).two_lines(4, "empty/step_000001.jsonl:1: not an object")
    record = rows(folder / "runs/bare/trajectories/step_000001.jsonl")[0]
    for turn in record["turns"]:
        turn["prompt_ids"], turn["policy"] = [1], "b"
    (folder / "empty" / "step_000001.jsonl").write_text(json.dumps(record) + "\n")
    cli(*train, "empty", sets=SETS).two_lines(4, "on the policy 'b', the recipe has not")


# export


def test_export_is_a_plain_folder_in_the_compute_dtype_that_serves_as_a_model(cli, folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "run", sets=SETS).code == 0
    done = cli("export", "run", "out/model")
    assert done.code == 0, done
    assert done.out.strip() == "out/model: policy policy of run after step 2"
    names = {path.name for path in (folder / "out/model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not {"optimizer.safetensors", "policy.json"} & names
    assert [path.name for path in (folder / "out").iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained("out/model")
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained("out/model").chat_template

    assert cli("export", "runs/run", "half", "--dtype", "bfloat16", "--step", "2").code == 0
    half = AutoModelForCausalLM.from_pretrained("half", dtype="auto")
    assert half.dtype == torch.bfloat16
    expected, got = dict(model.named_parameters()), dict(half.named_parameters())
    assert all(torch.equal(expected[name].to(torch.bfloat16), got[name]) for name in expected)

    sets = ("model.dtype=float32", "engine.deterministic=true", "model.name=out/model")
    assert cli("mars", "eval", "mars-embedded", "--smoke", sets=(*sets, "data.eval.limit=2")).code == 0

    cli("export", "run", "out/model").two_lines(2, "out/model holds files", "name a new folder")
    cli("export", "run", "parity_reward.py").two_lines(2, "is a file")
    cli("export", "run", "new", "--step", "7").two_lines(2, "no checkpoint of that step", "it has those of 2")
    cli("export", "run", "new", "--policy", "coach").two_lines(2, "--policy coach", "it has policy")
    cli("export", "ran", "new").two_lines(2, "there is no run 'ran'")
    cli("export", "run", "new", "--dtype", "int8").two_lines(
        2, "Invalid value for '--dtype': 'int8' is not one of 'float32', 'bfloat16'"
    )
    (folder / "runs" / "bare" / "checkpoints").mkdir(parents=True)
    cli("export", "bare", "new").two_lines(3, "has no whole checkpoint")
    assert not (folder / "new").exists()
    (folder / "there").mkdir()
    assert cli("export", "run", "there").code == 0, "an empty folder may be filled"


def test_export_takes_the_newest_when_the_checkpoint_is_pruned_while_it_is_copied(cli, folder, monkeypatch):
    import safetensors.torch

    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "run", "--steps", "1", sets=SETS).code == 0
    checkpoints = folder / "runs/run/checkpoints"
    real = safetensors.torch.load_file

    def pruned(path, *args, **kwargs):
        old = Path(path).parents[2]
        if int(old.name.removeprefix("step_")) in gone:
            shutil.copytree(old, checkpoints / f"step_{int(old.name.removeprefix('step_')) + 1:06d}")
            shutil.rmtree(old)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "load_file", pruned)
    gone = {1}
    done = cli("export", "run", "out")
    assert done.code == 0, done
    assert done.out.strip() == "out: policy policy of run after step 2"
    gone = {2, 3}
    done = cli("export", "run", "again")
    done.two_lines(1, "step_000003 was removed while it was copied", "export again")
    assert "None" not in done.err
    assert not (folder / "again").exists()
    gone = {4}
    cli("export", "run", "again", "--step", "4").two_lines(2, "no checkpoint of that step", "it has those of 5")


# check --show-sample


@pytest.mark.parametrize("syntax", ["tag", "hermes"])
def test_a_shown_sample_has_both_roles_with_their_masks(cli, syntax):
    sets: tuple[str, ...] = TINY
    if syntax == "hermes":
        sets = (
            *TINY,
            "mars={call_syntax: hermes, answer_reserve: 24}",
            "tools.python={}",
            "agents.system2.prompt=null",
        )
        sets = (*sets, "agents.system2.max_prompt_tokens=1500", "agents.system2.max_response_tokens=500")
    done = cli("check", "mars-embedded", "--show-sample", sets=sets)
    assert done.code == 0, done
    system2, system1 = done.out.split("\n--- ")[1:3]
    assert system2.startswith("system2 on policy policy: ")
    assert system1.startswith("system1 on policy policy: ")
    labels = ["[prompt] ", "[world] ", "[trained] "]
    assert all(label in system2 for label in labels)
    assert "The text of the first result" not in system2
    assert "[trained] What serves the purpose, in the words of System 1." in system1
    assert "The text of the first result" in system1.partition("[trained]")[0]
    if syntax == "hermes":
        assert '[trained] <tool_call>{"name": "python", "arguments": {"code": "key words"}' in system2


def test_a_shown_sample_downloads_no_model(cli, folder, monkeypatch):
    monkeypatch.setenv("AGENTRL_HOME", str(folder / "home"))
    done = cli("check", "mars-embedded", "--show-sample")
    done.two_lines(3, "smollm2-135m is not on this machine yet", "agentrl models prepare smollm2-135m")


def test_a_shown_sample_masks_a_role_that_is_not_trained(cli):
    done = cli("check", "mars-embedded", "--show-sample", sets=(*TINY, "mars.train=system2"))
    assert "[frozen] What serves the purpose" in done.out


# --checkpoint


def test_an_evaluated_checkpoint_scores_as_the_run_that_saved_it(cli, folder):
    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "run", sets=SETS).code == 0
    after = json.loads((folder / "runs/run/summary.json").read_text())["eval_after"]
    for spec in ("run", "runs/run", "run@2", "runs/run/checkpoints/latest/policies/policy"):
        done = cli("mars", "eval", "mars-embedded", "--smoke", "--checkpoint", spec, "--json", sets=SETS)
        assert done.code == 0, done
        assert done.json["eval"] == after
    cli("mars", "eval", "mars-embedded", "--smoke", "--checkpoint", "run@9", sets=SETS).two_lines(
        3, "has no whole checkpoint of step 9", "name another step"
    )
    cli("mars", "eval", "mars-embedded", "--smoke", "--checkpoint", "ran", sets=SETS).two_lines(3, "no run or folder")
    done = cli("mars", "infer", "mars-embedded", "--checkpoint", "run", "--question", "Who?", sets=TINY)
    assert done.code == 0, done
