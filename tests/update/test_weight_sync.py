"""New weights reach the engine, and the version is the engine's own word."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import EngineError
from agentrl.rollout.engine import load_hf_policy
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf import HFEngine
from agentrl.types import Key, Prompt, Request, Sampling
from agentrl.update.step import update_policy
from agentrl.update.weight_sync import sync


class _Stale:
    """An engine that takes the weights and says that it serves something else."""

    async def load_weights(self, policy, version, source):
        assert source.tensors is not None
        return version - 1


def test_an_engine_that_serves_another_version_ends_the_run(make_policy):
    policy = make_policy()
    policy.version = 4
    with pytest.raises(EngineError, match="serves version 3 after a sync of version 4"):
        asyncio.run(sync(policy, _Stale()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_after_a_sync_the_engine_samples_with_the_trainers_new_weights(
    tiny_folder, make_policy, make_credited, family, arch, dtype
):
    policy = make_policy(arch, dtype=dtype, lr=1e-2)
    prompt = list(range(40, 60))

    async def main():
        hf = load_hf_policy(tiny_folder[arch], dtype)
        engine = HFEngine({"policy": hf}, seed=0, gate=Gate(), deterministic=True)
        try:
            outs = []
            for step in range(3):
                request = Request("policy", Prompt.of(prompt), Sampling(max_tokens=6), Key("train", step, "t", 0, 0, 0))
                outs.append(await engine.generate(request))
                if step == 0:
                    update_policy(policy, family(6), AlgorithmConfig())
                else:
                    with torch.no_grad():  # a tied head must follow its embeddings
                        policy.masters["model.embed_tokens.weight"].mul_(1.5)
                    policy.publish()
                    policy.version += 1
                assert await sync(policy, engine) == policy.version
                outs.append(await engine.generate(request))
            return outs
        finally:
            await engine.close()

    outs = asyncio.run(main())
    assert [o.policy_version for o in outs] == [0, 1, 1, 2, 2, 3]
    assert all(before.logprobs != after.logprobs for before, after in zip(outs[::2], outs[1::2], strict=True))
    last = outs[-1]
    ids = prompt + list(last.ids)
    (values,) = policy.scorer.score([make_credited(ids, [(20, len(ids))]).sample])
    tolerance = 2e-5 if dtype == "float32" else 0.1
    assert list(values.values()) == pytest.approx(list(last.logprobs), abs=tolerance)
