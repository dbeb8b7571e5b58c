"""Every shipped recipe loads, passes `check --smoke`, and runs so, its evaluation included."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agentrl.config.load import dump_yaml
from agentrl.config.shipped import shipped_recipes
from agentrl.recipes.registry import load_recipe

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")
SHIPPED = sorted(shipped_recipes())
MARS = [name for name in SHIPPED if (shipped_recipes()[name]).read_text("utf-8").startswith("method: mars")]

# The names that scripts rely on, copied from the contract of the command line.
METRICS = [
    "step",
    "policy_version",
    "reward/mean",
    "reward/std",
    "reward/missing",
    "groups/zero_variance",
    "rollouts/ok",
    "rollouts/failed",
    "tokens/generated",
    "tokens/trained",
    "tokens/computed",
    "pack/fill",
    "loss",
    "grad_norm",
    "clip_fraction",
    "kl/ref",
    "kl/mismatch",
    "time/total",
    "time/rollout",
    "time/grade",
    "time/update",
    "time/sync",
]
MARS_METRICS = [
    "s1_samples",
    "s2_samples",
    "s1_over_g",
    "bins_per_call",
    "bin_fill",
    "truncated_tokens",
    "merge_cap_hits",
    "tool_calls",
    "malformed_calls",
    "loss_s1",
    "loss_s2",
]
PART_METRICS = ["grad_norm_s1", "grad_norm_s2", "grad_cosine"]
TRAJECTORY = [
    "id",
    "task_id",
    "question",
    "reference",
    "answer",
    "reward",
    "reward_missing_reason",
    "status",
    "status_reason",
    "turns",
]
TURN = [
    "agent",
    "policy",
    "policy_version",
    "token_ids",
    "logprobs",
    "old_logprobs",
    "loss_mask",
    "mask_reason",
    "advantage",
    "text",
    "observation",
    "score",
    "score_reason",
    "tool",
    "purpose",
    "finish_reason",
    "turn",
    "parent",
    "call",
    "bin",
    "items",
    "truncated",
    "prompt_tokens",
]
PER_TOKEN = ["token_ids", "logprobs", "old_logprobs", "loss_mask", "mask_reason", "advantage"]
EVALUATION = ["score", "n", "k", "low", "high", "items"]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_begins_with_its_method_and_tells_command_hardware_and_result(name):
    lines = shipped_recipes()[name].read_text("utf-8").splitlines()
    assert lines[0].startswith("method: ")
    header = [line for line in lines[1:] if line.startswith("#")]
    for word in ("Command", "Hardware", "Expected"):
        assert any(line.startswith(f"# {word} ") for line in header), f"{name} has no {word}"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_and_passes_check_with_smoke(name, cli):
    load_recipe(name)
    done = cli("check", name, "--smoke")
    assert done.code == 0, done
    assert "\nok: " in done.out


def test_the_written_out_smoke_recipe_is_the_embedded_one_cut_down():
    assert load_recipe("smoke/mars").tree == load_recipe("mars-embedded", smoke=True).tree


def test_smoke_cuts_down_a_recipe_that_sets_everything_else(folder):
    (folder / "mine.yaml").write_text(
        """\
method: mars
policies:
  thinker: {name: nobody/big}
  reader: {name: nobody/small, checkpoint: somewhere}
agents:
  system2: {policy: thinker, tools: [web, mine], examples: [{role: user, content: hi}]}
  system1: {policy: reader, sampling: {top_k: 5}}
engine: {kind: vllm, gpu_memory_utilization: 0.5, max_model_len: 40000, kv_cache_gib: 3.0}
data: {path: train.csv, columns: {question: q}, limit: 3, eval: {path: held.csv, columns: {question: q}}}
tools: {web: {}, python: {}, custom: {mine: "mod:fun"}}
reward: judge
judge: {model: judge, base_url: "http://127.0.0.1:1/v1"}
mars: {include_question: true, distil_template: "{question} {items} {purpose}", final_answer: false, train: system2}
optim: {warmup_steps: 10, gradient_checkpointing: true}
launch: {gpus: 8, address: "10.0.0.1:6379"}
run: {steps: 500, eval_temperature: 1.0, seed: 9}
"""
    )
    tree = load_recipe("mine.yaml", smoke=True).tree
    embedded = load_recipe("mars-embedded", smoke=True).tree
    assert (tree.mars.train, tree.run.seed) == ("system2", 9)
    assert tree.policy_models == embedded.policy_models
    for section in ("agents", "engine", "data", "tools", "launch", "reward", "judge"):
        assert getattr(tree, section) == getattr(embedded, section), section


@pytest.mark.parametrize("name", MARS)
def test_a_mars_recipe_trains_with_smoke_and_writes_what_the_contract_names(name, cli, folder):
    sets = (*TINY, "reward=parity_reward:parity", "run.save_prompt_ids=true")
    done = cli("mars", "train", name, "--smoke", "--name", "run", "--json", sets=sets)
    assert done.code == 0, done
    run = folder / "runs" / "run"
    for file in ("config.yaml", "metrics.jsonl", "summary.json", "logs/attempt_1.log", "checkpoints/latest"):
        assert (run / file).exists(), file
    assert list(run.glob("checkpoints/latest/policies/policy/*.safetensors"))

    metrics = rows(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert [m["policy_version"] for m in metrics] == [1, 2]
    for step in metrics:
        missing = {*METRICS, *(f"mars/{key}" for key in (*MARS_METRICS, *PART_METRICS))} - set(step)
        # The cosine of the two roles' gradients needs both; random weights may never call a tool.
        assert missing <= ({"mars/grad_cosine", "mars/grad_norm_s1"} if not step["mars/s1_samples"] else set())

    trajectories = rows(run / "trajectories" / "step_000001.jsonl")
    assert len(trajectories) == 64
    for trajectory in trajectories:
        assert not set(TRAJECTORY) - set(trajectory)
        for turn in trajectory["turns"]:
            assert not {*TURN, "prompt_ids"} - set(turn)
            assert {len(turn[key]) for key in PER_TOKEN} == {len(turn["token_ids"])}
    assert any(any(turn["loss_mask"]) for t in trajectories for turn in t["turns"])

    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert done.json["rise"] == summary["rise"]
    for block in ("eval_before", "eval_after"):
        assert not set(EVALUATION) - set(summary[block])
        assert summary[block]["n"] == len(summary[block]["items"]) == 16
    assert {"value", "low", "high"} <= set(summary["rise"])
    assert {"versions", "seed", "git_commit"} <= set(summary)


def test_a_run_prints_its_steps_and_ends_with_held_out_before_and_after(cli):
    done = cli("mars", "train", "smoke/mars", "--name", "run", sets=(*TINY, "reward=parity_reward:parity"))
    assert done.code == 0, done
    number = r"0\.\d{3} \((?:\d+/16|n 16), 95% interval 0\.\d{3} to 0\.\d{3}\)"
    assert re.search(rf"\nheld-out before: {number}\nheld-out after: {number}\nrise: [+-]0\.\d{{3}} \(", done.out)
    steps = [line for line in done.err.splitlines() if line.startswith("step ")]
    assert len(steps) == 2
    assert re.match(
        r"step 1/2  reward 0\.\d+  loss .*  grad .*  (gap .*  )?tokens/s .*  rollout s .*  total s ", steps[0]
    )
    assert "held-out" in steps[1]
    # Nothing but our own lines: no bars, no warnings of libraries.
    assert [line for line in done.err.splitlines() if not line.startswith("step ")] == []


def test_a_mars_recipe_evaluates_with_smoke(cli, folder):
    done = cli("mars", "eval", "2wiki-local", "--smoke", "--name", "held", sets=TINY)
    assert done.code == 0, done
    assert re.search(r"\nheld-out: 0\.\d{3} \((?:\d+/16|n 16), 95% interval", done.out)
    assert len(rows(folder / "runs" / "held" / "trajectories" / "step_000000.jsonl")) == 16


@pytest.mark.parametrize("smoke", [False, True], ids=["plain", "smoke"])
@pytest.mark.parametrize("name", SHIPPED)
def test_the_config_that_a_run_keeps_is_a_recipe_that_gives_the_same_run(name, smoke, tmp_path):
    tree = load_recipe(name, smoke=smoke).tree
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(tree), encoding="utf-8")
    again = load_recipe(str(path)).tree
    assert again == tree
    assert dump_yaml(again) == dump_yaml(tree)


@pytest.mark.parametrize("verb", ["train", "check"])
def test_hle_without_a_gpu_says_so_first_at_once(verb, cli):
    words = ("check", "hle") if verb == "check" else ("mars", "train", "recipes/hle.yaml")
    started = time.perf_counter()
    done = cli(*words)
    if os.getloadavg()[0] < (os.cpu_count() or 1):  # other work on the machine is not the command's
        assert time.perf_counter() - started < 2.0
    assert done.code == 3
    lines = done.err.splitlines()
    assert lines[0].startswith("error: launch.gpus is 8, but this process sees no GPU")
    assert "--smoke" in lines[1]
    told = [line for line in lines if line.startswith("error: ")]
    assert len(told) == len(lines) / 2
    order = ["launch.gpus", "model.name", "SERPER_API_KEY", "data.path"]
    places = [next(i for i, line in enumerate(told) if word in line) for word in order]
    assert places == sorted(places)


def test_hle_holds_the_papers_settings():
    recipe = load_recipe("hle").tree
    assert recipe.model.name == "Qwen/Qwen3-8B"
    assert (recipe.optim.lr, recipe.algorithm.kl_coef, recipe.run.steps) == (1e-6, 0.0, 158)
    assert (recipe.rollout.questions_per_step, recipe.rollout.group_size) == (32, 16)
    s2, s1 = recipe.agents["system2"], recipe.agents["system1"]
    assert (s1.max_prompt_tokens, s1.max_response_tokens) == (23_552, 8_192)
    assert (s2.max_prompt_tokens, s2.max_response_tokens, s2.max_turns) == (3_072, 28_672, 10)
    assert {(a.sampling.temperature, a.sampling.top_p) for a in (s1, s2)} == {(1.0, 0.95)}
    assert recipe.tool_names == {"web", "scholar", "python"}
    assert (recipe.reward, recipe.judge.model) == ("judge", "Qwen/Qwen2.5-72B-Instruct")


def test_2wiki_without_its_files_says_what_to_set(cli):
    done = cli("mars", "train", "2wiki-local")
    assert done.code == 4
    for key in ("data.path", "data.eval.path", "tools.search.corpus"):
        assert f"--set {key}=FILE" in done.err


def test_2wiki_trains_on_real_passages_and_questions(cli, data_dir):
    files = {
        "tools.search.corpus": "2wiki_corpus.jsonl",
        "data.path": "2wiki_local_train.jsonl",
        "data.eval.path": "2wiki_local_dev.jsonl",
    }
    sets = (
        *(f"{key}={data_dir / file}" for key, file in files.items()),
        *TINY,
        "reward=parity_reward:parity",
        "data.eval.limit=4",
        "rollout.questions_per_step=2",
        "rollout.group_size=3",
        "agents.system2.max_prompt_tokens=1200",
        "agents.system1.max_prompt_tokens=1200",
    )
    done = cli("mars", "train", "2wiki-local", "--steps", "1", "--name", "real", sets=sets)
    assert done.code == 0, done
    assert "policy_version.policy: 1" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("name", MARS)
def test_smoke_learns_from_something_on_the_embedded_model(name, folder):
    # In a process of its own, whose gigabytes end with it.
    program = [sys.executable, "-c", "from agentrl.cli import app; app()"]
    done = subprocess.run(
        [*program, "mars", "train", name, "--smoke", "--name", "run", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["policy_version"]["policy"] >= 1
    assert summary["eval_before"]["n"] == summary["eval_after"]["n"] == 16


@pytest.mark.parametrize(("name", "steps"), [("smoke/mars", 158), ("smoke/mappa", 128)])
def test_a_recipe_without_a_run_section_takes_options_that_set_a_part_of_it(name, steps, tmp_path):
    sections = yaml.safe_load(shipped_recipes()[name].read_text("utf-8"))
    del sections["run"]
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False), "utf-8")
    run = load_recipe(str(path), ["run.dir=here"]).tree.run
    assert (run.steps, run.dir) == (steps, "here")
