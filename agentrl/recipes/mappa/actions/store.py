"""The recorded actions and, in a file of their own, their labels: what `coach-eval` scores and measures against.

`actions.jsonl.gz` holds what a coach may be shown and nothing else; `labels.jsonl.gz` says which action is right, which
fault was injected where, and who is to blame. `provenance.json` says how both were made.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import DataError
from agentrl.protocols import CoachView
from agentrl.types import Task

FOLDER = Path(__file__).parent
ACTIONS, LABELS, PROVENANCE = "actions.jsonl.gz", "labels.jsonl.gz", "provenance.json"
Split = Literal["dev", "test"]


@dataclass(frozen=True, slots=True)
class RecordedAction:
    """One action as a coach may see it. `trajectory` groups the actions of a rollout, in order; `stratum` is the kind
    of question. `reference` and `info` are the task's, shown only to a coach that may see the ground truth."""

    id: str
    trajectory: str
    split: Split
    stratum: str
    task_id: str
    question: str
    reference: str
    info: Mapping[str, Any]
    agent: str
    role: str
    observed: str
    action: str
    feedback: str | None
    ledger: Mapping[str, Any] = field(default_factory=dict)

    def view(self, *, aware: bool, action: str | None = None) -> CoachView:
        """The coach's view; `aware` adds the reference, `action` stands in for what was said."""
        task = Task(self.task_id, self.question, (self.reference,), info=dict(self.info))
        return CoachView(
            task=task if aware else Task(self.task_id, self.question),
            agent=self.agent,
            role=self.role,
            observed=self.observed,
            action=self.action if action is None else action,
            feedback=self.feedback,
            ledger=dict(self.ledger),
            ground_truth=self.reference if aware else None,
        )


@dataclass(frozen=True, slots=True)
class Label:
    """`right` by the recorded team's rules; `fault` is the injected one, None elsewhere; `culprit` is the agent that
    the trajectory's fault was put into, None where it has none."""

    id: str
    right: bool
    fault: str | None
    culprit: str | None


def read_actions(folder: Path = FOLDER, split: Split | None = None) -> list[RecordedAction]:
    """The actions of a split (none: all), in their fixed order. Raises `DataError` for a file that is none."""
    found = _read(folder / ACTIONS, RecordedAction)
    return [action for action in found if split is None or action.split == split]


def read_labels(folder: Path = FOLDER) -> dict[str, Label]:
    """Label by action id. Raises `DataError` for a file that is none."""
    return {label.id: label for label in _read(folder / LABELS, Label)}


def write(folder: Path, actions: Iterable[RecordedAction], labels: Iterable[Label], about: Mapping[str, Any]) -> None:
    """Write the three files; equal values give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ((ACTIONS, actions), (LABELS, labels)):
        text = "".join(json.dumps(asdict(row), ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        (folder / name).write_bytes(gzip.compress(text.encode(), mtime=0))
    (folder / PROVENANCE).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read(path: Path, kind: type[Any]) -> list[Any]:
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        return [kind(**json.loads(line)) for line in lines]
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} holds no recorded actions ({type(error).__name__}: {error})", "reinstall agentrl"
        ) from error
