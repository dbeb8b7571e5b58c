"""Offsets that make a coach's scores comparable between kinds of tasks (MAPPA X-02).

A coach that likes one kind of task better pulls training towards it. `agentrl mappa coach-eval` measures the means per
kind, right and wrong actions weighing the same, and says which offsets even them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.types import Score


def calibrated(score: Score, offsets: Mapping[str, float], kind: Any) -> Score:
    """The score with its kind's offset, held within 0 and 10; the coach's own stays in its info as `uncalibrated`.

    Missing stays missing, and a kind without an offset stays as it is.
    """
    offset = offsets.get(kind) if isinstance(kind, str) else None
    if score.value is None or offset is None:
        return score
    return replace(
        score, value=min(10.0, max(0.0, score.value + offset)), info={**score.info, "uncalibrated": score.value}
    )
