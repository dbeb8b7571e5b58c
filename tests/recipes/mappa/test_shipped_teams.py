"""MathChat and the DSBench team as they ship: the paper's settings, what `check` says, `--smoke` whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.recipes.registry import load_recipe

TEAMS = {
    "mathchat": ("problem_solver", "code_executor", "verifier"),
    "mathchat-1.5b": ("problem_solver", "code_executor", "verifier"),
    "dsbench": ("data_engineer", "modeler", "analyst"),
}


def tiny(name: str) -> tuple[str, ...]:
    """A team on tiny-llama, whose tokens are bytes and whose window is short: without the worked examples."""
    models = [f"policies.{n}.{k}" for n in TEAMS[name] for k in ("name=tiny-llama", "dtype=float32")]
    room = [f"agents.{n}.{k}" for n in TEAMS[name] for k in ("max_prompt_tokens=1400", "examples=[]")]
    short = [f"agents.{n}.sampling.max_tokens=8" for n in TEAMS[name]]
    return (*models, *room, *short, "engine.deterministic=true", "launch.threads=1", "mappa.mask_truncated=false")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("name", "model"),
    [("mathchat", "Qwen/Qwen3-4B"), ("mathchat-1.5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")],
)
def test_mathchat_holds_the_papers_settings(name, model):
    recipe = load_recipe(name).tree
    assert {m.name for m in recipe.policy_models.values()} == {model}
    assert list(recipe.policy_models) == list(recipe.agents) == list(TEAMS[name])
    assert [a.max_turns for a in recipe.agents.values()] == [1, 2, 1]
    assert [a.tools for a in recipe.agents.values()] == [(), ("python",), ()]
    assert {(a.sampling.temperature, a.sampling.top_p, a.sampling.max_tokens) for a in recipe.agents.values()} == {
        (1.0, 1.0, 4_096)
    }
    assert {a.max_prompt_tokens for a in recipe.agents.values()} == {24_576}
    assert (recipe.rollout.questions_per_step, recipe.rollout.group_size, recipe.optim.mini_batch) == (32, 2, 16)
    optim = recipe.optim
    assert (optim.lr, optim.betas, optim.weight_decay, optim.max_grad_norm) == (1e-6, (0.9, 0.95), 0.0, 1.0)
    assert (optim.schedule, optim.min_lr_ratio, optim.warmup_steps) == ("cosine", 0.1, round(0.03 * 128 * 4))
    assert (recipe.mappa.kl_coef, recipe.algorithm.clip_eps_low, recipe.algorithm.clip_eps_high) == (0.01, 0.2, 0.2)
    assert (recipe.run.steps, recipe.run.eval_every, recipe.run.save_every, recipe.run.seed) == (128, 4, 32, 42)
    assert (recipe.run.eval_temperature, recipe.mappa.eval_trials, recipe.mappa.eval_score) == (0.6, 4, "outcome")
    assert (recipe.data.sample, recipe.data.sample_seed, recipe.tools.python.timeout_s) == (512, 42, 30.0)
    assert (recipe.reward, recipe.coach.model, recipe.coach.ground_truth) == ("math", "gemini-2.5-flash", ("verifier",))
    assert [(got.agent, got.what, got.thinking) for got in recipe.receives("code_executor")] == [
        ("problem_solver", "output", True)
    ]
    assert [(got.agent, got.what) for got in recipe.receives("verifier")] == [("code_executor", "both")]
    longest = max(a.max_prompt_tokens + a.max_response_tokens for a in recipe.agents.values())
    assert longest <= recipe.engine.max_model_len


def test_dsbench_holds_the_papers_settings():
    recipe = load_recipe("dsbench").tree
    assert list(recipe.policy_models) == list(recipe.agents) == list(TEAMS["dsbench"])
    assert {a.max_turns for a in recipe.agents.values()} == {4}
    assert {a.sampling.max_tokens for a in recipe.agents.values()} == {16_384}
    assert [a.must_save for a in recipe.agents.values()] == [
        ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
        ("model.pkl",),
        ("submission.csv",),
    ]
    assert recipe.mappa.answer_file == "submission.csv"
    assert (recipe.rollout.questions_per_step, recipe.rollout.group_size, recipe.optim.mini_batch) == (16, 2, 16)
    assert (recipe.run.steps, recipe.run.eval_every, recipe.run.save_every) == (120, 2, 4)
    assert (recipe.tools.python.timeout_s, recipe.reward, recipe.data.stratify) == (60.0, "table", "kind")
    assert recipe.coach.ground_truth == ()  # agnostic: no coach sees the hidden answers unless it is told to
    assert not any(got.thinking for name in recipe.agents for got in recipe.receives(name))
    for agent in recipe.agents.values():
        assert agent.max_prompt_tokens + agent.max_response_tokens <= recipe.engine.max_model_len


@pytest.mark.parametrize("name", list(TEAMS))
def test_check_without_gpu_key_and_data_says_so_in_that_order_at_once(name, cli, monkeypatch):
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    started = time.perf_counter()
    done = cli("check", name)
    if os.getloadavg()[0] < (os.cpu_count() or 1):  # other work on the machine is not the command's
        assert time.perf_counter() - started < 2.0
    assert done.code == 3
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert told[0].startswith("error: launch.gpus is 6, but this process sees no GPU")
    order = ["launch.gpus", "policies.", "GEMINI_API_KEY", "data.path", "data.eval.path"]
    places = [next(i for i, line in enumerate(told) if word in line) for word in order]
    assert places == sorted(places)


def test_m32_a_held_out_problem_of_the_training_pool_is_refused_by_its_number_and_named(cli, folder):
    pool = [{"id": f"2024-I-{n}", "prompt": f"Find {n}.", "answer": str(n)} for n in range(1, 9)]
    held = [{"id": "0", "prompt": "Worded anew.", "answer": "3", "year": 2024, "problem_number": 3, "part": "I"}]
    for name, lines in (("pool", pool), ("held", held)):
        (folder / f"{name}.json").write_text(json.dumps(lines))
    sets = (*tiny("mathchat"), *(f"data.{key}=null" for key in ("split", "eval.split", "eval.limit")),
            "data.path=pool.json", "data.eval.path=held.json",
            "data.columns={question: prompt}", "data.eval.columns={question: prompt}")  # fmt: skip
    fault = "1 of its 1 questions are"
    for words in (("check", "mathchat", "--smoke"), ("mappa", "train", "mathchat", "--smoke", "--name", "run")):
        done = cli(*words, sets=sets)
        assert done.code == 4, done
        assert fault in done.err
        assert "'0' first (as '2024-I-3'" in done.err
    assert not (folder / "runs" / "run" / "trajectories").exists()


def test_m28_mathchat_with_smoke_trains_grades_by_rules_and_evaluates_by_trials(cli, folder):
    (folder / "odd.py").write_text("def odd(view):\n    return 10.0 * (len(view.action) % 2), 'odd or even'\n")
    sets = (*tiny("mathchat"), "coach.rules=odd:odd")
    done = cli("mappa", "train", "mathchat", "--smoke", "--name", "run", "--json", sets=sets)
    assert done.code == 0, done
    metrics = rows(folder / "runs/run/metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    for agent in TEAMS["mathchat"]:
        assert {f"mappa/{agent}/{key}" for key in ("coach_mean", "tool_rate", "truncated", "kl")} <= set(metrics[0])
    assert {m["outcome/missing"] for m in metrics} == {0}
    assert sum(done.json["policy_version"].values()) > 0
    sets = (*sets, "mappa.eval_trials=4", "run.eval_temperature=0.6")
    held = cli("mappa", "eval", "mathchat", "--smoke", "--checkpoint", "run", "--name", "held", "--json", sets=sets)
    assert held.code == 0, held
    assert (held.json["eval"]["n"], held.json["eval"]["trials"], held.json["measured"]) == (4, 16, "outcome")
    assert "se" in held.json["eval"]
    turns = [t for row in rows(folder / "runs/held/trajectories/step_000000.jsonl") for t in row["turns"]]
    assert {turn["score"] for turn in turns} == {None}  # no coach was asked


def test_dsbench_with_smoke_trains_and_reports_its_success(cli, folder):
    done = cli("mappa", "train", "dsbench", "--smoke", "--name", "run", "--json", sets=tiny("dsbench"))
    assert done.code == 0, done
    trajectories = rows(folder / "runs/run/trajectories/step_000001.jsonl")
    assert len(trajectories) == 4
    assert {row["reward"] for row in trajectories} == {0.0}  # random weights write no program
    assert sum(done.json["policy_version"].values()) > 0 or "trained nothing" in done.err
    held = cli("mappa", "eval", "dsbench", "--smoke", "--name", "held", "--json", sets=tiny("dsbench"))
    assert held.code == 0, held
    assert held.json["table"]["success_rate"] == 0.0
    assert held.json["table"]["classification"]["accuracy"] == {"plain": None, "fair": 0.5}
    assert held.json["table"]["runs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mathchat", "dsbench"])
def test_smoke_on_the_embedded_model_calls_its_tool_and_trains_on_some_tokens(name, folder):
    # In a process of its own, whose gigabytes end with it.
    program = [sys.executable, "-c", "from agentrl.cli import app; app()"]
    done = subprocess.run(
        [*program, "mappa", "train", name, "--smoke", "--name", "run", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["policy_version"].values()) > 0, done.stderr
    metrics = rows(folder / "runs/run/metrics.jsonl")
    assert sum(m["tokens/trained"] for m in metrics) > 0
    assert sum(m["mappa/tool_calls"] for m in metrics) > 0
