"""The policies of a training run on all its trainer ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from agentrl.config.schema import BaseRecipe
from agentrl.launch.devices import Plan
from agentrl.launch.distributed import Group, Member, backend_of
from agentrl.recipes.loop import Ground, make_policies
from agentrl.recipes.quiet import quiet_libraries
from agentrl.recipes.session import Session
from agentrl.update.follower import serve
from agentrl.update.policy import Policy
from agentrl.update.ranks import Ranks
from agentrl.update.scorer import Scorer

log = logging.getLogger(__name__)


@contextmanager
def open_policies(
    recipe: BaseRecipe, session: Session, *, references: bool, total_steps: Mapping[str, int]
) -> Iterator[tuple[dict[str, Policy], dict[str, Scorer], Ranks]]:
    """The driver's policies and references (as `make_policies`), and with `launch.ranks` above 1 the other ranks, which
    hold replicas of them and end with the block, however it ends.

    Raises as `make_policies`, there and here, and as `Group.start`.
    """
    plan, ground = session.plan, Ground.of(session)
    make = partial(make_policies, recipe, references=references, total_steps=total_steps)
    policies, scorers = make(ground)
    if plan.ranks == 1:
        yield policies, scorers, Ranks()
        return
    group = Group.start(plan.ranks, partial(_follow, make, ground, plan), backend=backend_of(plan.device))
    log.info("trainer ranks 1 to %d are up: processes %s", plan.ranks - 1, group.pids)
    try:
        ranks = Ranks(group, plan.rank_threads)
        for policy in policies.values():
            ranks.spread(policy)
        yield policies, scorers, ranks
    finally:
        group.close()


def _follow(
    make: partial[tuple[dict[str, Policy], dict[str, Scorer]]], ground: Ground, plan: Plan, member: Member
) -> None:
    """A rank's life, in its own process."""
    device = "cpu" if plan.device == "cpu" else f"cuda:{member.rank}"
    if plan.device == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(plan.rank_threads)
    with quiet_libraries():
        serve(partial(make, replace(ground, device=device, follower=True)), member)
