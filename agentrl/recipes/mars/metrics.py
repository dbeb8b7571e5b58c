"""A MARS step in numbers: the shared ones from the update, then the method's own (spec C2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.recipes.collect import total_counts
from agentrl.recipes.mars.config import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.credit import Credit
from agentrl.types import ScoredTrajectory
from agentrl.update.step import UpdateResult

_PARTS = {SYSTEM1: "s1", SYSTEM2: "s2"}


def mars_metrics(
    scored: Sequence[ScoredTrajectory], credit: Credit, results: Mapping[str, UpdateResult]
) -> dict[str, float | None]:
    """One flat mapping. With several policies the shared names carry `/<policy>`; without, they stand bare."""
    out: dict[str, float | None] = {}
    for name, result in results.items():
        suffix = "" if len(results) == 1 else f"/{name}"
        out.update({f"{key}{suffix}": value for key, value in result.metrics.items() if key not in _moved(key)})
        out.update({_moved(key)[key]: value for key, value in result.metrics.items() if key in _moved(key)})
    counts = total_counts(scored)
    calls = counts["calls/search"] + sum(v for k, v in counts.items() if k.startswith("calls/") and k != "calls/search")
    packed = [s.trajectory.counts.get("bins", 0) for s in scored]
    num_calls = counts["tool_calls"]
    out |= dict(credit.metrics)
    out |= {
        "mars/tool_calls": num_calls,
        "mars/tools_per_question": calls / len(scored) if scored else None,
        "mars/tool_errors": counts["tool_errors"],
        "mars/malformed_calls": counts["malformed_calls"],
        "mars/bins_per_call": counts["bins"] / num_calls if num_calls else None,
        "mars/bins_per_trajectory": sum(packed) / len(packed) if packed else None,
        "mars/bin_fill": counts["bin_tokens"] / counts["bin_capacity"] if counts["bin_capacity"] else None,
        "mars/truncated_tokens": counts["truncated_tokens"],
        "mars/merge_cap_hits": counts["merge_cap_hits"],
        "mars/turn_limit": sum(s.trajectory.status == "turn_limit" for s in scored),
        "mars/truncated": sum(s.trajectory.status == "truncated" for s in scored),
        "mars/response_tokens_s1": _mean_length(scored, SYSTEM1),
        "mars/response_tokens_s2": _mean_length(scored, SYSTEM2),
    }
    for key in ("mars/loss_s1", "mars/loss_s2"):
        out.setdefault(key, 0.0)
    return out


def _moved(key: str) -> dict[str, str]:
    """Metrics of a part under the method's own names: loss/system1 -> mars/loss_s1."""
    head, _, part = key.rpartition("/")
    if part in _PARTS and head in ("loss", "grad_norm", "clip_fraction"):
        return {key: f"mars/{head}_{_PARTS[part]}"}
    return {key: "mars/grad_cosine"} if key == "grad_cosine" else {}


def _mean_length(scored: Sequence[ScoredTrajectory], agent: str) -> float | None:
    lengths = [len(t.action.completion.ids) for s in scored for t in s.trajectory.turns if t.action.agent == agent]
    return sum(lengths) / len(lengths) if lengths else None
