"""What a trainer rank beside the driver does: it holds replicas and follows orders (`agentrl.update.ranks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.launch.distributed import Member
from agentrl.update.policy import Policy
from agentrl.update.ranks import ScoreOrder, UpdateOrder, WeightsOrder
from agentrl.update.scorer import Scorer
from agentrl.update.step import add_gradients

Build = Callable[[], tuple[Mapping[str, Policy], Mapping[str, Scorer]]]
"""Makes the followers and the references, by policy name. It is pickled by name."""


def serve(build: Build, member: Member) -> None:
    """Follow orders until the driver ends."""
    policies, references = build()
    member.send(None)
    for order in member.orders():
        policy = policies[order.policy]
        match order:
            case UpdateOrder():
                member.send(_update(policy, references.get(order.policy), order, member))
            case WeightsOrder():
                member.spread_first(policy.trained_weights().values())
                policy.version = order.version
            case ScoreOrder():
                scorer = references[order.policy] if order.reference else policy.scorer
                member.send(scorer.score(order.samples))


def _update(policy: Policy, reference: Scorer | None, order: UpdateOrder, member: Member) -> object:
    def meet(part: str | None) -> None:
        member.add_to_first(policy.grads.values())
        policy.zero_grad()

    return add_gradients(policy, order, reference, meet)
