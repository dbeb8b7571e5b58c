"""What a session stands on, by the verb that opens it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.launch.devices import GIB, Hardware, Plan
from agentrl.models import prepare
from agentrl.recipes import session as module
from agentrl.recipes.registry import load_recipe
from agentrl.recipes.session import open_session


def test_only_a_session_that_trains_plans_trainer_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    monkeypatch.setattr(module, "detect", lambda: Hardware(1, GIB))
    prepare("tiny-llama")
    recipe = load_recipe("mars-embedded", ["model.name=tiny-llama", "launch.ranks=8"], smoke=True).tree

    async def opened(**how: bool) -> Plan:
        async with open_session(recipe, seed=0, **how) as session:
            return session.plan

    threads = torch.get_num_threads()
    try:
        assert asyncio.run(opened()).ranks == 1
        with pytest.raises(ConfigError, match=r"launch.ranks is 8: 8 threads are more than 4"):
            asyncio.run(opened(trains=True))
    finally:
        torch.set_num_threads(threads)
