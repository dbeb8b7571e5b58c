"""New weights reach the engine, and the engine says so."""

from __future__ import annotations

from agentrl.errors import EngineError
from agentrl.protocols import Engine, WeightSource
from agentrl.update.policy import Policy


async def sync(policy: Policy, engine: Engine) -> int:
    """Give the engine the policy's compute weights; returns the version it confirms.

    Raises `EngineError` when the engine serves another version afterwards: the counter is the engine's, not ours.
    """
    served = await engine.load_weights(policy.name, policy.version, WeightSource(tensors=policy.compute_weights()))
    if served != policy.version:
        raise EngineError(
            f"policy {policy.name!r}: the engine serves version {served} after a sync of version {policy.version}",
            "restart the run with --resume",
        )
    return served
