"""What breaks on a trainer rank ends the update there and then."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest

from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DivergedError, RunFailedError
from agentrl.launch.distributed import Group
from agentrl.update.follower import serve
from agentrl.update.ranks import Ranks, ScoreOrder
from agentrl.update.shards import split
from agentrl.update.step import update_policy


def test_a_loss_that_is_not_finite_on_a_rank_names_its_sample(made, tiny_folder, family):
    policy = made.make(tiny_folder["llama"], "float32", "full")
    credited = family(12)
    last = split([c.sample for c in credited], 2, policy.layout)[1][0]
    credited[last] = replace(credited[last], advantages=(math.nan,) * len(credited[last].advantages))
    group = Group.start(2, partial(serve, partial(made.build, tiny_folder["llama"], "float32")))
    with pytest.raises(
        DivergedError, match=rf"the advantage value of token \d+ of sample '{credited[last].sample.id}'"
    ):
        update_policy(policy, credited, AlgorithmConfig(), ranks=Ranks(group))
    group.close()


def test_a_rank_that_is_killed_in_an_update_ends_it_in_seconds(made, tiny_folder, family):
    policy = made.make(tiny_folder["llama"], "bfloat16", "full")
    group = Group.start(2, partial(serve, partial(made.build, tiny_folder["llama"], "bfloat16")))
    ranks = Ranks(group)
    update_policy(policy, family(12), AlgorithmConfig(), ranks=ranks)
    assert group.send([ScoreOrder("policy", False, tuple(one.sample for one in family(5)))]) is None
    assert group.meet()[0] == policy.scorer.score([one.sample for one in family(5)])  # bf16 weights, bit for bit
    os.kill(group.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RunFailedError, match="trainer rank 1 of 2 ended: killed by SIGKILL"):
        update_policy(policy, family(12), AlgorithmConfig(), ranks=ranks)
    assert time.monotonic() - began < 5
    group.close()
