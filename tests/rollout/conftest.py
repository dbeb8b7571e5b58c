"""Tiny models with random weights and their byte-level tokenizer, for the engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.grammar import GrammarFactory
from agentrl.models import prepare
from agentrl.rollout.engine import load_hf_policy, load_tokenizer
from agentrl.rollout.hf_generate import HFPolicy
from agentrl.rollout.scripted import ScriptedPolicy


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(tmp_path_factory.mktemp("home")))
        return {arch: prepare(f"tiny-{arch}") for arch in ("llama", "qwen3", "gemma3", "gpt2")}


@pytest.fixture
def policy(tiny_folder) -> HFPolicy:
    return load_hf_policy(tiny_folder["llama"], "float32")


@pytest.fixture
def policy_of(tiny_folder):
    return lambda arch: load_hf_policy(tiny_folder[arch], "float32")


@pytest.fixture
def scripted_policy(tiny_folder) -> ScriptedPolicy:
    grammar = GrammarFactory.from_folder(tiny_folder["llama"])
    return ScriptedPolicy(load_tokenizer(tiny_folder["llama"]), grammar.vocab_size, grammar.eos_ids, grammar)
