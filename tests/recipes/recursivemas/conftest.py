"""Small systems of several architectures and sizes, with links of random weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import load_system

sys.path.insert(0, str(Path(__file__).parent))

from held_out import QUESTIONS, ROUNDS, STEPS, TEXT_TOKENS

MODELS = {
    "planner": "tiny-gemma3",
    "critic": "tiny-llama-h96",
    "solver": "tiny-qwen3",
    "math": "tiny-gpt2",
    "code": "tiny-llama-h96",
    "science": "tiny-gemma3",
    "summarizer": "tiny-qwen3",
    "expert": "tiny-gpt2-h96",
    "learner": "tiny-llama",
    "reflector": "tiny-qwen3",
    "caller": "tiny-qwen3",
}
AGENTS = {
    "sequential_light": ("planner", "critic", "solver"),
    "sequential_scaled": ("planner", "critic", "solver"),
    "mixture": ("math", "code", "science", "summarizer"),
    "distillation": ("expert", "learner"),
    "deliberation": ("reflector", "caller"),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def make_recipe():
    """A recipe of a style on tiny models, one of its own per agent; keyword arguments are the method's keys."""

    def make(style="sequential_light", models=None, **own):
        own = {"style": style, "rounds": 2, "latent_steps": 4, "allow_untrained": True, **own}
        names = dict.fromkeys(own["roles"]) if style == "custom" else AGENTS[style]
        models = models or {name: MODELS[name] for name in names}
        data = {
            "method": "recursivemas",
            "policies": {n: {"name": models[n], "mode": "frozen", "dtype": "float32"} for n in models},
            "recursivemas": own,
        }
        return RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)

    return make


@pytest.fixture(scope="session")
def make_system(make_recipe):
    """(recipe, loaded system), loaded once for the same arguments."""
    cache = {}

    def make(style="sequential_light", **own):
        recipe = make_recipe(style, **own)
        if style not in cache:
            cache[style] = load_system(recipe)
        return recipe, cache[style]

    return make


@pytest.fixture
def make_held_out(make_recipe, tmp_path):
    """A greedy recipe over three questions, on tiny models; keyword arguments are the method's keys."""

    def build(style="sequential_light", sampling=None, rows=QUESTIONS, **own):
        file = tmp_path / "held_out.jsonl"
        file.write_text("".join(json.dumps({"id": i, "question": q, "answer": a}) + "\n" for i, q, a in rows), "utf-8")
        own = {"rounds": ROUNDS, "latent_steps": STEPS, "answer": "short", **own}
        data = make_recipe(style, **own).model_dump(mode="json", exclude_unset=True)
        data |= {"run": {"steps": 0, "dir": str(tmp_path / "runs")}, "launch": {"threads": 1}}
        data["data"] = {"path": str(file)}
        for agent in data["agents"].values():
            agent["sampling"] |= {"temperature": 0.0, "max_tokens": TEXT_TOKENS, **(sampling or {})}
        return RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)

    return build
