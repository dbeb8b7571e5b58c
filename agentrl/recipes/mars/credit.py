"""Who earned what in MARS: trajectory reward -> advantage per role -> balanced copies -> weight per token.

Per question and role (section 6.2): A = (r - mean) / (std + eps) over all of the role's samples, where every System 1
sample inherits its trajectory's reward. Only then is System 1 drawn down or copied up to the System 2 count (6.3);
advantages travel with the samples. The loss is a mean over the role's samples of the mean over their trained tokens
(6.4), each role over its own set, so the weight of a token is copies / (N_role * |y|).

Statistics and draws are over trajectories with a reward, whatever of them is trained: a role that is frozen, or a
token that a grammar forced, has no weight but leaves the baseline and the draw as they are.

Deviations and silences: the standard deviation is n-1 plus 1e-6 by default; a group of one sample, or of equal
rewards, gets advantage 0 (public GRPO code would give a lone sample A = r, an unbaselined push); samples whose reward
is missing are in no statistic and in no count, G is then the number of those present, and a question with fewer than
two is left out. The draw is uniform: no source describes one by |A|, which is the ablation `balance: weighted`.
Copies are weights, not rows. Questions without variance have advantage 0 and do count in the mean over samples.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.algo.advantage import group_advantages
from agentrl.algo.sampling import balance_counts, weighted_balance_counts
from agentrl.algo.weights import sequence_mean_weights, token_mean_weights
from agentrl.recipes.mars.config import MarsConfig
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.types import CreditedSample, Sample, ScoredSample


@dataclass(frozen=True, slots=True)
class Credit:
    """Credited samples in the order given, copies per sample, and what the step's metrics report."""

    credited: tuple[CreditedSample, ...]
    copies: tuple[float, ...]
    metrics: Mapping[str, float | None]


def assign(samples: Sequence[Sample], mars: MarsConfig, *, seed: int, step: int) -> Credit:
    """Credit all samples of one step, in any order. Those left out have advantage and weight 0."""
    advantages: list[float] = [0.0] * len(samples)
    copies: list[float] = [0.0] * len(samples)
    questions = _members(samples)
    kept = {q: roles for q, roles in questions.items() if _num_trajectories(samples, roles) >= 2}
    for question, roles in kept.items():
        pools = [roles[SYSTEM2] + roles[SYSTEM1]] if mars.normalise == "joint" else [roles[SYSTEM2], roles[SYSTEM1]]
        if not mars.sample_first:
            _normalise(samples, pools, mars, advantages)
        target = _num_trajectories(samples, roles)
        drawn = _draw(roles[SYSTEM1], target, mars, advantages, _rng(seed, step, question))
        for i in roles[SYSTEM2]:
            copies[i] = 1.0
        for i, count in zip(roles[SYSTEM1], drawn, strict=True):
            copies[i] = float(count)
        if mars.sample_first:
            expanded = [[i for i in pool for _ in range(int(copies[i]))] for pool in pools]
            _normalise(samples, expanded, mars, advantages)
    weights = _weights(samples, copies, mars)
    credited = tuple(_credited(s, a, w) for s, a, w in zip(samples, advantages, weights, strict=True))
    return Credit(credited, tuple(copies), _metrics(samples, kept, len(questions), advantages))


def _members(samples: Sequence[Sample]) -> dict[str, dict[str, list[int]]]:
    """Question -> role -> indices of its samples with a reward. Grouping and order follow ids, never positions."""
    out: dict[str, dict[str, list[int]]] = {}
    for i, sample in enumerate(samples):
        roles = out.setdefault(sample.group, {SYSTEM2: [], SYSTEM1: []})
        if not sample.score.missing:
            roles[sample.part].append(i)
    for roles in out.values():
        for members in roles.values():
            members.sort(key=lambda i: samples[i].id)
    return out


def _num_trajectories(samples: Sequence[Sample], roles: Mapping[str, Sequence[int]]) -> int:
    """G of a question: its trajectories with a reward."""
    return len({samples[i].trajectory_id for members in roles.values() for i in members})


def _metrics(
    samples: Sequence[Sample],
    kept: Mapping[str, Mapping[str, Sequence[int]]],
    num_questions: int,
    advantages: Sequence[float],
) -> dict[str, float | None]:
    """Samples with a reward, M/G over the questions, and the share of questions without signal, per role."""

    def flat(role: str) -> float | None:
        groups = [roles[role] for roles in kept.values() if roles[role]]
        return sum(all(advantages[i] == 0.0 for i in g) for g in groups) / len(groups) if groups else None

    ratios = [len(roles[SYSTEM1]) / _num_trajectories(samples, roles) for roles in kept.values()]
    return {
        "groups/zero_variance": flat(SYSTEM2),
        "groups/skipped": num_questions - len(kept),
        "mars/zero_variance_s1": flat(SYSTEM1),
        "mars/s2_samples": sum(len(roles[SYSTEM2]) for roles in kept.values()),
        "mars/s1_samples": sum(len(roles[SYSTEM1]) for roles in kept.values()),
        "mars/s1_over_g": sum(ratios) / len(ratios) if ratios else None,
        "mars/s1_over_g_min": min(ratios, default=None),
        "mars/s1_over_g_max": max(ratios, default=None),
    }


def _normalise(samples: Sequence[Sample], pools: Sequence[Sequence[int]], mars: MarsConfig, out: list[float]) -> None:
    unbiased = mars.advantage_std == "unbiased"
    for pool in pools:
        rewards = [samples[i].score.value for i in pool]
        values = group_advantages(rewards, unbiased=unbiased, eps=mars.advantage_eps)
        for i, value in zip(pool, values, strict=True):
            assert value is not None, "a missing reward is in no pool"
            out[i] = value


def _draw(
    members: Sequence[int], target: int, mars: MarsConfig, advantages: Sequence[float], rng: random.Random
) -> list[int]:
    """Copies of each System 1 sample of one question: `target` in all, or one each without balancing."""
    if mars.balance == "none":
        return [1] * len(members)
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
