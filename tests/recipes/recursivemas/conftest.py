"""Small systems of several architectures and sizes, with links of random weights."""

from __future__ import annotations

import json

import pytest
import torch

from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import load_system

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
