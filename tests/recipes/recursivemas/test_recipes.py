"""The five styles as recipes: the published settings, what is refused without a GPU, and a sixth of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from agentrl.cli import app
from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.prompts import fields_of
from agentrl.recipes.registry import load_recipe
from agentrl.update.link_files import save_official_inner, save_official_outer
from agentrl.update.links import InnerLink, OuterLink

# recipe: rounds, steps, tokens, questions together, models by agent
PUBLISHED = {
    "sequential-light": (
        (3, 32, 2000, 16),
        {
            "planner": "Qwen/Qwen3-1.7B",
            "critic": "meta-llama/Llama-3.2-1B-Instruct",
            "solver": "Qwen/Qwen2.5-Math-1.5B-Instruct",
        },
    ),
    "sequential-scaled": (
        (2, 64, 2000, 16),
        {
            "planner": "google/gemma-3-4b-it",
            "critic": "meta-llama/Llama-3.2-3B-Instruct",
            "solver": "Qwen/Qwen3.5-4B",
        },
    ),
    "mixture": (
        (3, 48, 4000, 16),
        {
            "math": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            "code": "Qwen/Qwen2.5-Coder-3B-Instruct",
            "science": "BioMistral/BioMistral-7B",
            "summarizer": "Qwen/Qwen3.5-2B",
        },
    ),
    "distillation": ((3, 64, 4000, 16), {"expert": "Qwen/Qwen3.5-9B", "learner": "Qwen/Qwen3.5-4B"}),
    "deliberation": ((2, 32, 4000, 8), {"reflector": "Qwen/Qwen3.5-4B", "caller": "Qwen/Qwen3.5-4B"}),
}
OFFICIAL = "sequential-light-official"
SHIPPED = (*PUBLISHED, OFFICIAL)


def _run(capfd, *words):
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        app(list(words))
    out, err = capfd.readouterr()
    return left.value.code or 0, out, err


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_holds_the_published_models_and_settings(name):
    recipe = load_recipe(name).tree
    (rounds, steps, tokens, batch), models = PUBLISHED[name]
    config, sampling = recipe.recursivemas, recipe.decoder.sampling
    assert (config.rounds, config.latent_steps, sampling.max_tokens, config.max_batch) == (rounds, steps, tokens, batch)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, recipe.run.seed) == (0.6, 0.95, 0, 42)
    assert {a: recipe.policy_models[agent.policy].name for a, agent in recipe.agents.items()} == models
    assert all(model.mode == "frozen" for model in recipe.policy_models.values())
    assert (recipe.optim.lr, recipe.optim.betas, recipe.optim.schedule) == (5e-4, (0.9, 0.95), "cosine")
    assert (recipe.run.steps, config.train.inner_steps, config.train.batch) == (40_000, 20_000, 4)
    assert not config.match_norm
    assert (config.inner_form, config.outer_form) == ("ln_res", "ln_res")


def test_t24_the_deliberations_tools_have_the_published_limits():
    recipe = load_recipe("deliberation").tree
    assert recipe.decoder.tools == ("python", "search")
    assert (recipe.tools.python.timeout_s, recipe.tools.search.top_k) == (10.0, 4)
    assert recipe.recursivemas.tool_loop.model_dump() == {"max_calls": 5, "max_result_chars": 6000}


@pytest.mark.parametrize("name", SHIPPED)
def test_without_a_gpu_it_is_refused_at_once_gpu_and_models_first(name, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    start = time.perf_counter()
    code, _, err = _run(capfd, "check", name)
    if os.getloadavg()[0] < (os.cpu_count() or 1):  # other work on the machine is not the command's
        assert time.perf_counter() - start < 2.0
    lines = err.splitlines()
    assert code == 3
    assert lines[0].startswith("error: launch.gpus is 1, but this process sees no GPU")
    assert "--smoke" in lines[1]
    told = [line for line in lines if line.startswith("error: ")]
    assert "model '" in told[1]
    assert len(told) == len(lines) / 2


@pytest.mark.parametrize("round_number", [1, 2])
def test_the_released_layout_is_carried_role_by_role(round_number):
    """Who hears what in which order (specs 3.3): latents inside the user turn, the solver hears its plan first."""
    config = load_recipe(OFFICIAL).tree.recursivemas
    order = {a: fields_of(config.prompt_of(a, round_number)) for a in config.graph.agents}
    assert order == {
        "planner": ("question",) if round_number == 1 else ("question", "solver"),
        "critic": ("question", "planner"),
        "solver": ("critic", "question", "instruction"),
    }
    assert {config.system_of(a) for a in config.graph.agents} == {"You are a helpful assistant."}
    assert [e.key for e in config.graph.edges] == ["12", "23", "31"]
    assert config.enable_thinking is False
    assert not config.match_norm


def test_released_files_run_in_the_released_layout_with_pasted_texts(capfd, monkeypatch, tmp_path):
    """Files of the released kind for tiny models, beside the recipe, and a user's own system and role texts."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    dims = {"planner": 64, "critic": 96, "solver": 64}
    folders = load_recipe(OFFICIAL).tree.recursivemas.official
    for agent, dim in dims.items():
        save_official_inner(tmp_path / folders.inner[agent], {"math": InnerLink(dim)})
    edges = [("12", "planner", "critic"), ("23", "critic", "solver"), ("31", "solver", "planner")]
    links = [(key, f"{a}-{b}", OuterLink(dims[a], dims[b])) for key, a, b in edges]
    save_official_outer(tmp_path / folders.outer, {"math": links}, "sequential")
    models = {"planner": "tiny-qwen3", "critic": "tiny-llama-h96", "solver": "tiny-gemma3"}
    sets = [
        *(f"policies.{a}.name={m}" for a, m in models.items()),
        *(f"policies.{a}.mode=frozen" for a in models),
        *("launch.gpus=0", "launch.threads=1"),
        "recursivemas.latent_steps=4",
        "agents.solver.sampling.max_tokens=4",
        "recursivemas.roles.solver.system=PASTED SYSTEM",
        "recursivemas.roles.solver.prompt=PASTED {critic} then {question} {instruction}",
    ]
    words = [word for text in sets for word in ("--set", text)]
    code, out, err = _run(capfd, "recursivemas", "infer", OFFICIAL, "--question", "How many?", "--json", *words)
    assert code == 0, err
    told = json.loads(out)
    assert told["links"]["trained"]
    assert [t["agent"] for t in told["answers"][0]["trace"]] == ["planner", "critic", "solver"] * 2 + [
        "planner",
        "critic",
    ]
    code, _, err = _run(capfd, "check", OFFICIAL, *words, "--set", "recursivemas.official.outer=elsewhere")
    assert (code, "recursivemas.official.outer: there is no folder 'elsewhere'" in err) == (3, True)


SIXTH = """\
method: recursivemas
policies:
  small: {name: tiny-llama, mode: frozen, dtype: float32}
  wide: {name: tiny-gpt2-h96, mode: frozen, dtype: float32}
agents:
  scout: {policy: small}
  left: {policy: wide}
  right: {policy: small}
  judge: {policy: wide, sampling: {temperature: 0.0, max_tokens: 5}}
recursivemas:
  style: custom
  decoder: judge
  answer: short
  rounds: 3
  latent_steps: 3
  allow_untrained: true
  roles:
    scout:
      system: You look first.
      first: "Look at this: {question}"
      prompt: "Look at this: {question} The judge thought: {judge}"
    left: {prompt: "For it. {scout} {question}"}
    right: {prompt: "Against it. {scout} {question}"}
    judge: {prompt: "One says {left} the other {right} about {question} {instruction}"}
  edges:
    - {source: scout, target: left}
    - {source: scout, target: right}
    - {source: left, target: judge}
    - {source: right, target: judge}
    - {source: judge, target: scout, feedback: true}
launch: {gpus: 0, threads: 1}
run: {steps: 0}
"""


def test_t23_a_sixth_style_of_four_agents_is_a_yaml_file(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SIXTH)
    code, out, err = _run(capfd, "recursivemas", "infer", "mine.yaml", "--question", "Is it far?", "--json")
    assert code == 0, err
    (answer,) = json.loads(out)["answers"]
    assert [(t["round"], t["agent"]) for t in answer["trace"]] == [
        *((r, a) for r in (1, 2) for a in ("scout", "left", "right", "judge")),
        *((3, a) for a in ("scout", "left", "right")),
    ]
    assert answer["trace"][0]["sent_norm"].keys() == {"scout-left", "scout-right"}
    assert answer["counts"]["latent_steps"] == 11 * 3
    assert answer["counts"]["text_tokens"] == 5


def test_a_roles_system_text_replaces_the_styles():
    roles = {"solver": {"prompt": "{critic} {question} {instruction}", "system": "Mine."}}
    config = RecursiveConfig(roles=roles)
    assert (config.system_of("solver"), config.system_of("planner")) == ("Mine.", "You are a helpful assistant.")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_smoke_runs_a_recipe_whole_on_the_embedded_model(name, tmp_path):
    """In a process of its own: training, its evaluation, then an answer by the links that it wrote. 90 s when calm."""
    environment = {key: value for key, value in os.environ.items() if key != "AGENTRL_HOME"}
    program = [sys.executable, "-c", "from agentrl.cli import app; app()", "recursivemas"]

    def run(*words):
        done = subprocess.run(
            [*program, *words, "--smoke", "--json"], capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    start = time.perf_counter()
    summary = run("train", name, "--name", "run")
    assert summary["steps"] == 2
    answers = run("infer", name, "--question", "What is the capital of France?", "--links", "run")["answers"]
    assert answers[0]["text"]
    if os.getloadavg()[0] < (os.cpu_count() or 1):
        assert time.perf_counter() - start < 90
