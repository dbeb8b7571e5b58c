"""Which files a team's agents saved, and which they should have: evidence of who broke what (MAPPA M-08)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

TASK = "task"


@dataclass(frozen=True, slots=True)
class FileLedger:
    """`saved`: file -> who saved it last ("task" for the task's own files). `required`: agent -> files it must save.

    `needs`: agent -> files of others that its work needs; where an agent is not named, all that others must save.
    `acted` are the agents that have finished: only they can be to blame for a file that is not there.
    """

    required: Mapping[str, Sequence[str]] = field(default_factory=dict)
    saved: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    acted: tuple[str, ...] = ()

    def after(self, agent: str, files: Iterable[str], *, finished: bool = False) -> FileLedger:
        """The ledger with files that `agent` saved; `finished` when it will not act again."""
        saved = {**self.saved, **dict.fromkeys(files, agent)}
        acted = (*self.acted, agent) if finished and agent not in self.acted else self.acted
        return replace(self, saved=saved, acted=acted)

    def view(self, agent: str) -> dict[str, Any]:
        """What a coach is shown of it before it scores `agent`.

        `available`: file -> who saved it; `must_save`: this agent's files; `missing`: those of them that are not there;
        `missing_upstream`: file that it needs -> the agent that finished without saving it.
        """
        must, needs = list(self.required.get(agent, ())), self.needs.get(agent)
        upstream = {
            name: other
            for other in self.acted
            if other != agent
            for name in self.required.get(other, ())
            if name not in self.saved and (needs is None or name in needs)
        }
        return {
            "available": dict(self.saved),
            "must_save": must,
            "missing": [name for name in must if name not in self.saved],
            "missing_upstream": upstream,
        }


def shown(ledger: Mapping[str, Any]) -> str:
    """A ledger view as lines of text; "no files" where there is nothing to tell."""
    lines = [f"{name}: saved by {who}" for name, who in ledger.get("available", {}).items()]
    lines += [f"{name}: MISSING, this agent must save it" for name in ledger.get("missing", ())]
    lines += [
        f"{name}: MISSING, {who} should have saved it" for name, who in ledger.get("missing_upstream", {}).items()
    ]
    known = {"available", "must_save", "missing", "missing_upstream"}
    lines += [f"{name}: {value}" for name, value in ledger.items() if name not in known]
    return "\n".join(lines) or "no files"
