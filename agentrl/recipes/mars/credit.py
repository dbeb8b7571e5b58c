"""Who earned what in MARS: trajectory reward -> advantage per role -> balanced copies -> weight per token.

Per question and role (section 6.2): A = (r - mean) / (std + eps) over all of the role's samples, where every System 1
sample inherits its trajectory's reward. Only then is System 1 drawn down or copied up to the System 2 count (6.3);
advantages travel with the samples. The loss is a mean over the role's samples of the mean over their trained tokens
(6.4), each role over its own set, so the weight of a token is copies / (N_role * |y|).

Deviations and silences: the standard deviation is n-1 plus 1e-6 by default; a group of one sample, or of equal
rewards, gets advantage 0 (public GRPO code would give a lone sample A = r, an unbaselined push); samples whose reward
is missing are in no statistic and in no count. The draw is uniform: no source describes one by |A|, which is the
ablation `balance: weighted`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.algo.advantage import group_advantages
from agentrl.algo.sampling import balance_counts, weighted_balance_counts
from agentrl.algo.weights import sequence_mean_weights, token_mean_weights
from agentrl.recipes.mars.config import SYSTEM1, SYSTEM2, MarsConfig
from agentrl.types import CreditedSample, Sample, ScoredSample


@dataclass(frozen=True, slots=True)
class Credit:
    """Credited samples in the order given, copies per sample, and what the step's metrics report."""

    credited: tuple[CreditedSample, ...]
    copies: tuple[float, ...]
    metrics: Mapping[str, float | None]


def assign(samples: Sequence[Sample], mars: MarsConfig, *, seed: int, step: int) -> Credit:
    """Credit all samples of one step. A sample without a trained token gets weight 0 and is in no statistic."""
    advantages: list[float] = [0.0] * len(samples)
    copies: list[float] = [0.0] * len(samples)
    by_question = _members(samples)
    flat = {SYSTEM2: 0, SYSTEM1: 0}
    ratios: list[float] = []
    for question, roles in by_question.items():
        target = len(roles[SYSTEM2])
        pools = [roles[SYSTEM2] + roles[SYSTEM1]] if mars.normalise == "joint" else [roles[SYSTEM2], roles[SYSTEM1]]
        if not mars.sample_first:
            _normalise(samples, pools, mars, advantages)
        for i in roles[SYSTEM2]:
            copies[i] = 1.0
        drawn = _draw(samples, roles[SYSTEM1], target, mars, advantages, _rng(seed, step, question))
        for i, count in zip(roles[SYSTEM1], drawn, strict=True):
            copies[i] = float(count)
        if mars.sample_first:
            expanded = [[i for i in pool for _ in range(int(copies[i]))] for pool in pools]
            _normalise(samples, expanded, mars, advantages)
        for role, members in roles.items():
            flat[role] += bool(members) and all(advantages[i] == 0.0 for i in members)
        if target:
            ratios.append(len(roles[SYSTEM1]) / target)
    weights = _weights(samples, copies, mars)
    credited = tuple(_credited(s, a, w) for s, a, w in zip(samples, advantages, weights, strict=True))
    num_s2 = sum(len(r[SYSTEM2]) for r in by_question.values())
    metrics: dict[str, float | None] = {
        "groups/zero_variance": flat[SYSTEM2] / len(by_question) if by_question else None,
        "mars/zero_variance_s1": flat[SYSTEM1] / len(by_question) if by_question else None,
        "mars/s2_samples": num_s2,
        "mars/s1_samples": sum(len(r[SYSTEM1]) for r in by_question.values()),
        "mars/s1_over_g": sum(ratios) / len(ratios) if ratios else None,
        "mars/s1_over_g_min": min(ratios, default=None),
        "mars/s1_over_g_max": max(ratios, default=None),
    }
    return Credit(credited, tuple(copies), metrics)


def _members(samples: Sequence[Sample]) -> dict[str, dict[str, list[int]]]:
    """Question -> role -> indices of its samples that can be trained. Grouping follows ids, never positions."""
    out: dict[str, dict[str, list[int]]] = {}
    for i, sample in enumerate(samples):
        roles = out.setdefault(sample.group, {SYSTEM2: [], SYSTEM1: []})
        if sample.num_trained and not sample.score.missing:
            roles[sample.part].append(i)
    return out


def _normalise(samples: Sequence[Sample], pools: Sequence[Sequence[int]], mars: MarsConfig, out: list[float]) -> None:
    unbiased = mars.advantage_std == "unbiased"
    for pool in pools:
        rewards = [samples[i].score.value for i in pool]
        values = group_advantages(rewards, unbiased=unbiased, eps=mars.advantage_eps)
        for i, value in zip(pool, values, strict=True):
            assert value is not None, "a missing reward has no trained token and is in no pool"
            out[i] = value


def _draw(
    samples: Sequence[Sample],
    members: Sequence[int],
    target: int,
    mars: MarsConfig,
    advantages: Sequence[float],
    rng: random.Random,
) -> list[int]:
    if mars.balance == "none" or mars.system1 == "off":
        return [1] * len(members)
    if mars.train == "system1":
        target = len({samples[i].trajectory_id for i in members})
    if mars.balance == "weighted":
        return weighted_balance_counts([abs(advantages[i]) for i in members], target, rng)
    return balance_counts(len(members), target, rng)


def _weights(samples: Sequence[Sample], copies: Sequence[float], mars: MarsConfig) -> list[float]:
    """One weight per trained token of each sample, a mean within each role."""
    mean = sequence_mean_weights if mars.loss_mean == "sequence" else token_mean_weights
    out = [0.0] * len(samples)
    for role in (SYSTEM2, SYSTEM1):
        mine = [i for i, s in enumerate(samples) if s.part == role and copies[i] > 0]
        weights = mean([samples[i].num_trained for i in mine], [copies[i] * samples[i].weight for i in mine])
        for i, weight in zip(mine, weights, strict=True):
            out[i] = weight
    return out


def _credited(sample: Sample, advantage: float, weight: float) -> CreditedSample:
    trained = sample.loss_mask
    return CreditedSample(
        ScoredSample(sample),
        tuple(advantage if t else 0.0 for t in trained),
        tuple(weight if t else 0.0 for t in trained),
    )


def _rng(seed: int, step: int, question: str) -> random.Random:
    """The draw of one question at one step: a function of the run's seed alone, so a resumed run repeats it."""
    digest = hashlib.blake2b(repr(("balance", seed, step, question)).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))
