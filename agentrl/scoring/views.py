"""What a coach sees of one action (MAPPA M-02): made from a turn, whose tools have therefore finished (M-03)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.errors import ConfigError
from agentrl.files import encode
from agentrl.protocols import CoachView
from agentrl.types import Task, Turn


def view_of(
    turn: Turn,
    task: Task,
    *,
    role: str,
    observed: str,
    ledger: Mapping[str, Any] | None = None,
    truth: str | None = None,
    aware: Sequence[str] = (),
) -> CoachView:
    """The view of one finished turn. `observed` is the whole prompt the agent saw, as text.

    `truth` (the reference, or an outcome's metrics) goes in for the agents named in `aware` alone; by default a coach
    is agnostic (M-06). Raises `ConfigError` when the role or the prompt is empty: a coach cannot judge an action
    without them.
    """
    for name, text in (("role", role), ("observed", observed)):
        if not text.strip():
            raise ConfigError(f"the coach's view of {turn.action.agent} has no {name}", f"give the agent its {name}")
    seen = turn.observation
    return CoachView(
        task=task,
        agent=turn.action.agent,
        role=role,
        observed=observed,
        action=turn.action.text,
        feedback=None if seen is None else seen.text,
        ledger=dict(ledger or {}),
        ground_truth=truth if turn.action.agent in aware else None,
    )


def view_key(view: CoachView) -> str:
    """A hash of everything in a view: equal views are the same question to a coach."""
    return hashlib.blake2b(encode(asdict(view)), digest_size=16).hexdigest()
