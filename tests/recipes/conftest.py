"""The command line in this process, in a user's folder, on tiny models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import app

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")
REWARD = """
from agentrl.types import Score


class Parity:
    async def score(self, task, trajectory):
        return Score(float(sum(len(turn.action.text) for turn in trajectory.turns) % 2))


def parity():
    return Parity()


def broken():
    raise KeyError("a fault of the user's own")


def with_arguments(task, trajectory):
    return 1.0
"""


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def two_lines(self, code: int, cause: str, fix: str = "") -> None:
        """Every fault is one line of cause and one of fix, without a trace, and the first is this one."""
        assert self.code == code, self
        lines = self.err.strip().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("error: "))
        assert [line.split(": ")[0] for line in lines[first:]] == ["error", "fix"] * ((len(lines) - first) // 2)
        assert cause in lines[first], self.err
        assert fix in lines[first + 1], self.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: `parity_reward.py`, without GPU and without secrets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "parity_reward.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def cli(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`cli("mars", "train", ...)`: exit code, stdout and stderr. `sets` become `--set` options."""

    def run(*args: str, sets: tuple[str, ...] = ()) -> Done:
        capfd.readouterr()
        words = [*args, *(word for text in sets for word in ("--set", text))]
        with pytest.raises(SystemExit) as left:
            app(words)
        out, err = capfd.readouterr()
        code = left.value.code
        return Done(code if isinstance(code, int) else 0, out, err)

    return run
