"""Bad input: a one-line cause and a one-line fix, before a model is loaded where it can be known; nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.recipes.plugins import named_function

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")
TRAIN = ("mars", "train", "mars-embedded", "--smoke")
OWN = (*TINY, "data={path: tasks.jsonl}", "reward=parity_reward:parity", "rollout.questions_per_step=2")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def tasks(folder: Path) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text('{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": "d"}\n')
    return path


@pytest.mark.parametrize(
    ("sets", "code", "cause", "fix"),
    [
        (["optim.lrr=1"], 2, "optim.lrr: unknown key (given 1)", "optim.lr"),
        (["mars.packng=ffd"], 2, "mars.packng: unknown key", "packing"),
        (["run.steps=two"], 2, 'run.steps: got "two", expected a whole number', ""),
        (["optim.lr=-1"], 2, "optim.lr: got -1", ""),
        (["rollout.group_size=1"], 2, "rollout.group_size", "2"),
        (["launch.gpus=8", "rollout.questions_per_step=1", "rollout.group_size=3"], 2, "some of the 8 GPUs", "3"),
        (["launch.gpus=2"], 3, "launch.gpus is 2, but this process sees no GPUs", "launch.gpus: 0"),
        (["rollout.questions_per_step=721"], 4, "720 tasks, fewer than rollout.questions_per_step (721)", "720"),
        (["model.name=nobody/nothing"], 3, "'nobody/nothing' is neither a folder here nor", "hf download"),
        (["model.name=smollm3-135m"], 3, "there is no model called 'smollm3-135m'", "did you mean smollm2-135m?"),
        (["model.checkpoint=nowhere"], 3, "there is no run or folder 'nowhere'", "RUN@step"),
        (["data.path=none.jsonl"], 4, "there is no file and no embedded set 'none.jsonl'", "--set data.path=FILE"),
        (["data.eval.path=none.csv"], 4, "no embedded set 'none.csv'", "--set data.eval.path=FILE"),
        (["tools.search.corpus=none.jsonl"], 4, "no embedded corpus 'none.jsonl'", "--set tools.search.corpus=FILE"),
        (["reward=exact"], 2, "'exact' is neither exact_match, f1, judge nor a function", "module:function"),
        (["reward=parity_reward:nothing"], 2, "parity_reward has no nothing", "module:function"),
        (["reward=parity_reward:with_arguments"], 2, "cannot be called without arguments", "without arguments"),
        (
            ["reward=parity_reward:a_number"],
            2,
            "reward: what 'parity_reward:a_number' returns (float) has no",
            "async def",
        ),
        (["reward=parity_reward:Synchronous"], 2, "has a `score` that is not async", "async def score"),
        (["agents.system2.max_prompt_tokens=4000"], 2, "do not fit in the window of 2048", "lower one of the two"),
        (["agents.system2.max_prompt_tokens=100"], 2, "prompt and examples alone take", "shorten the prompt"),
        (["agents.system1.max_prompt_tokens=100"], 2, "prompt and examples alone take", "shorten the prompt"),
        (["mars.call_syntax=hermes"], 2, "mars.call_grammar: needs mars.call_syntax: tag", ""),
        (["launch.threads=100000"], 2, "launch.threads is 100000, more than", "set launch.threads to"),
        (["data.eval.path=null", "run.eval_every=1"], 2, "data.eval.path: no held-out set is named, but run.eval", ""),
        (["data.eval.path=null", "run.keep_best=true"], 2, "data.eval.path: no held-out set is named", "run.keep_best"),
        (["model.mode=frozen"], 2, "nothing is trained", "set the mode"),
        (["run.name=a/b"], 2, "run.name: 'a/b' is not a folder name", "plain folder name"),
        (["engine.kv_cache_gib=1.0"], 2, "kv_cache_gib has no effect with kind: hf", "vllm"),
    ],
)
def test_a_bad_setting_is_one_cause_and_one_fix(cli, folder, sets, code, cause, fix):
    cli(*TRAIN, sets=(*TINY, *sets)).two_lines(code, cause, fix)


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        (None, "there is no file and no embedded set 'tasks.jsonl'", "--set data.path=FILE"),
        ("", "tasks.jsonl: the file is empty", "data.path"),
        ('{"problem": "a?", "solution": "b"}\n', "needed question (column 'question')", "data.columns"),
        ('{"question": "a?", "answer": "b"}\n{"question"\n', "tasks.jsonl:2: broken JSON", ""),
        ('{"question": "a?"}\n', "needed answer", "data.columns"),
        ('{"question": "a?", "answer": "b", "id": 1}\n' * 2, "the id '1' is taken", "unique"),
    ],
)
def test_bad_data_is_one_cause_and_one_fix(cli, tasks, text, cause, fix):
    if text is None:
        tasks.unlink()
    else:
        tasks.write_text(text)
    cli("mars", "train", "2wiki-local", sets=(*OWN, "tools.search.corpus=invented")).two_lines(4, cause, fix)
    assert not Path("runs").exists()


def test_a_recipe_that_is_not_there_or_not_yaml(cli, folder):
    cli("mars", "train", "mars-embeded").two_lines(2, "no shipped recipe", "did you mean mars-embedded?")
    (folder / "broken.yaml").write_text("method: mars\nmodel: {name: [\n")
    cli("mars", "train", "broken.yaml").two_lines(2, "broken.yaml:")


def test_a_corpus_with_a_broken_line_is_named_by_its_line(cli, tasks):
    Path("pages.jsonl").write_text('{"title": "a", "text": "b"}\n{"title": "a", "text": \n')
    done = cli("mars", "train", "2wiki-local", sets=(*OWN, "tools.search.corpus=pages.jsonl"))
    done.two_lines(4, "pages.jsonl:2")
    Path("pages.jsonl").write_text('{"name": "a", "body": "b"}\n')
    done = cli("mars", "train", "2wiki-local", sets=(*OWN, "tools.search.corpus=pages.jsonl"))
    done.two_lines(4, "has no title and no text", "title and text")


def test_a_question_longer_than_its_budget_is_a_failed_rollout_that_is_counted(cli, tasks, folder):
    tasks.write_text(json.dumps({"question": "why? " * 400, "answer": "b"}) + '\n{"question": "c?", "answer": "d"}\n')
    sets = (*OWN, "data.eval={path: tasks.jsonl}", "run.steps=1", "rollout.group_size=6")
    done = cli(*TRAIN, "--name", "long", "--json", sets=sets)
    assert done.code == 0, done
    [step] = rows(folder / "runs/long/metrics.jsonl")
    assert (step["rollouts/failed"], step["rollouts/ok"], step["reward/missing"]) == (6, 6, 6)
    records = rows(folder / "runs/long/trajectories/step_000001.jsonl")
    reasons = {record["status_reason"] for record in records if record["status"] == "failed"}
    assert len(records) == 12
    assert len(reasons) == 1
    assert "more than 512" in reasons.pop()
    assert "50% of the rewards are missing" in done.err
    assert done.json["eval_before"]["missing"] == 1


def test_a_fault_in_a_users_reward_is_told_as_its_own(cli, tasks):
    done = cli(*TRAIN, sets=(*OWN, "data.eval={path: tasks.jsonl}", "reward=parity_reward:broken"))
    done.two_lines(2, "reward: 'parity_reward:broken' raised KeyError: \"a fault of the user's own\"", "--debug")


def test_a_reward_that_returns_no_score_ends_the_run_with_its_reason(cli, tasks, folder):
    sets = (*OWN, "data.eval={path: tasks.jsonl}", "reward=parity_reward:Bare")
    done = cli(*TRAIN, "--name", "bare", sets=sets)
    done.two_lines(1, "reward: every reward of step 1 is missing: returned float, not Score", "--resume")
    assert len(rows(folder / "runs/bare/trajectories/step_000001.jsonl")) > 0


def test_a_step_without_variance_changes_no_weight_and_says_so(cli, folder):
    done = cli(*TRAIN, "--name", "flat", "--json", sets=(*TINY, "data.eval.limit=2"))
    assert done.code == 0, done
    assert done.json["policy_version"] == {"policy": 0}
    assert "step 1 trained nothing" in done.err


@pytest.mark.parametrize("target", ["..:x", ":x", "a b:x", ".json:dumps", "json:", "json:du mps"])
def test_a_function_of_the_users_that_no_module_can_hold_is_a_config_fault(target):
    with pytest.raises(ConfigError, match="neither built in nor module:function"):
        named_function("reward", target)
