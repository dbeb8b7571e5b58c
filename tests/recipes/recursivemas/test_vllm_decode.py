"""The last decode by vLLM says what the hf engine says, token for token, in fp32."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import pytest

from agentrl.recipes.recursivemas.decode import open_decoder
from agentrl.recipes.recursivemas.infer import answer_batch, trajectories
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import load_system
from agentrl.types import Task

WORDS = ["sea", "river", "bridge", "apple", "king", "garden", "storm", "train", "clock", "hill", "letter", "winter"]
TASKS = [Task(f"{ask}{w}", f"{ask} the {w}.") for ask in ("Tell me a story about", "Name two facts on") for w in WORDS]


def _recipe(engine, tokens=16, **agent):
    data = {
        "method": "recursivemas",
        "model": {"name": "smollm2-135m", "mode": "frozen", "dtype": "float32"},
        "engine": engine,
        "agents": {"learner": {"sampling": {"temperature": 0.0, "max_tokens": tokens}, **agent}},
        "recursivemas": {
            "style": "distillation",
            "rounds": 2,
            "latent_steps": 6,
            "match_norm": True,
            "allow_untrained": True,
        },
        "launch": {"gpus": 0, "threads": 1},
    }
    return RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_decodes_latent_prompts_to_the_same_greedy_text_as_hf(monkeypatch):
    """24 prompts with latents of a two-agent recursion in their slots."""
    monkeypatch.delenv("AGENTRL_HOME", raising=False)  # where the embedded model is made already
    vllm = _recipe({"kind": "vllm", "kv_cache_gib": 0.25, "max_model_len": 512, "max_batch": 8})
    loaded = load_system(vllm)

    async def said(recipe):
        async with open_decoder(recipe, loaded) as decoder:
            return await answer_batch(recipe, loaded, decoder, TASKS, "infer")

    ours, theirs = asyncio.run(said(_recipe({"kind": "hf"}))), asyncio.run(said(vllm))
    for a, b in zip(ours.decodes[0], theirs.decodes[0], strict=True):
        (x,), (y,) = a.actions, b.actions
        assert x.completion.ids == y.completion.ids, (x.text, y.text)
        assert x.completion.logprobs == pytest.approx(y.completion.logprobs, abs=1e-3)
        assert x.request.prompt.segments[1].length == 6
    assert len({said.text for said in theirs.decodes[0]}) > 12  # not one text for all
    assert theirs.decoded_positions == sum(
        len(s.actions[0].request.prompt) + len(s.actions[0].completion.ids) - 1 for s in theirs.decodes[0]
    )
    counts = [t.trajectory.counts for t in trajectories(vllm, theirs)]
    assert [c["positions"] for c in counts] == [t.trajectory.counts["positions"] for t in trajectories(vllm, ours)]
