"""A MARS step in numbers: the shared ones from the update, then the method's own (spec C2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentrl.recipes.collect import total_counts
from agentrl.recipes.mars.credit import Credit
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.types import MaskReason, ScoredTrajectory
from agentrl.update.step import UpdateResult, has_effect

_PARTS = MappingProxyType({SYSTEM1: "s1", SYSTEM2: "s2"})
_GIVEN = (MaskReason.PROMPT, MaskReason.WORLD)


def mars_metrics(
    scored: Sequence[ScoredTrajectory], credit: Credit, results: Mapping[str, UpdateResult], kl_coef: float
) -> dict[str, float | None]:
    """One flat mapping. With several policies the shared names carry `/<policy>`; without, they stand bare.

    `mars/bins_per_call` is the mean number of bins of a call whose results System 1 read. Calls that were answered
    without it (no results, a failed tool, raw results of at most `mars.bypass_tokens`) have none and are not in it.
    """
    out: dict[str, float | None] = {}
    for name, result in results.items():
        suffix = "" if len(results) == 1 else f"/{name}"
        out.update({f"{key}{suffix}": value for key, value in result.metrics.items() if key not in _moved(key)})
        out.update({_moved(key)[key]: value for key, value in result.metrics.items() if key in _moved(key)})
    counts = total_counts(scored)
    num_calls = counts["tool_calls"]
    out |= dict(credit.metrics)
    out |= {
        "mars/tool_calls": num_calls,
        "mars/tools_per_question": num_calls / len(scored) if scored else None,
        "mars/tool_errors": counts["tool_errors"],
        "mars/malformed_calls": counts["malformed_calls"],
        "mars/bins_per_call": counts["bins"] / counts["distilled_calls"] if counts["distilled_calls"] else None,
        "mars/bins_per_trajectory": counts["bins"] / len(scored) if scored else None,
        "mars/bin_fill": counts["bin_tokens"] / counts["bin_capacity"] if counts["bin_capacity"] else None,
        "mars/truncated_tokens": counts["truncated_tokens"],
        "mars/merge_cap_hits": counts["merge_cap_hits"],
        "mars/turn_limit": sum(s.trajectory.status == "turn_limit" for s in scored),
        "mars/truncated": sum(s.trajectory.status == "truncated" for s in scored),
        "mars/response_tokens_s1": _mean_length(scored, SYSTEM1),
        "mars/response_tokens_s2": _mean_length(scored, SYSTEM2),
    }
    idle = [one.sample for one in credit.credited if not has_effect(one, kl_coef)]
    out |= masked_tokens(credit) | {"tokens/no_advantage": sum(sample.num_trained for sample in idle)}
    # A role that moved nothing in this step has no row of its own: its numbers are 0.
    names = [f"mars/{head}_{role}" for head in ("loss", "clip_fraction", "grad_norm") for role in ("s1", "s2")]
    measured = any(name in out for name in names if "grad_norm" in name)
    for name in names:
        if measured or "grad_norm" not in name:
            out.setdefault(name, 0.0)
    if measured and len(results) == 1:
        out.setdefault("mars/grad_cosine", None)
    return out


def masked_tokens(credit: Credit) -> dict[str, float | None]:
    """Sampled tokens outside the loss mask, by reason (spec M4).

    With `tokens/trained` and `tokens/no_advantage` (inside the mask, in samples that could not move the weights: a
    group without variance, a copy count of 0) they are all that were sampled.
    """
    counts: Counter[str] = Counter()
    for one in credit.credited:
        counts.update(str(reason) for reason in one.sample.reasons if reason is not None)
    return {f"tokens/masked/{reason}": counts[reason] for reason in MaskReason if reason not in _GIVEN}


def untrained_reason(credit: Credit, kl_coef: float) -> str | None:
    """Why a step trains no token, as one line of counts; None when it trains some."""
    if any(has_effect(one, kl_coef) for one in credit.credited):
        return None
    if not credit.credited:
        return "there are no samples"
    samples = [one.sample for one in credit.credited]
    table = {key.rpartition("/")[2]: count for key, count in masked_tokens(credit).items() if count}
    open_tokens = sum(s.num_trained for s in samples)
    if open_tokens:
        table["no advantage"] = open_tokens
    rewards: dict[str, set[float]] = {}
    for sample in samples:
        if sample.score.value is not None:
            rewards.setdefault(sample.group, set()).add(sample.score.value)
    varying = sum(len(values) > 1 for values in rewards.values())
    tokens = ", ".join(f"{reason} {count}" for reason, count in table.items())
    return f"tokens: {tokens or 'none'}; rewards differ in {varying} of {len({s.group for s in samples})} questions"


def _moved(key: str) -> dict[str, str]:
    """Metrics of a part under the method's own names: loss/system1 -> mars/loss_s1."""
    head, _, part = key.rpartition("/")
    if part in _PARTS and head in ("loss", "grad_norm", "clip_fraction"):
        return {key: f"mars/{head}_{_PARTS[part]}"}
    return {key: "mars/grad_cosine"} if key == "grad_cosine" else {}


def _mean_length(scored: Sequence[ScoredTrajectory], agent: str) -> float | None:
    lengths = [len(t.action.completion.ids) for s in scored for t in s.trajectory.turns if t.action.agent == agent]
    return sum(lengths) / len(lengths) if lengths else None
