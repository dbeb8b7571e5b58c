"""Faults that end a command: one line with the cause, one with the fix, and the exit code of the CLI contract."""

from __future__ import annotations


class AgentRLError(Exception):
    """A fault that the user can act on. `exit_code` follows the CLI contract."""

    exit_code = 1

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix

    @property
    def faults(self) -> tuple[tuple[str, str], ...]:
        """Every (cause, fix) behind this error; errors that gather several override it."""
        return ((self.cause, self.fix),)

    def __str__(self) -> str:
        return "\n".join(f"{cause}\nfix: {fix}" for cause, fix in self.faults)


class RunFailedError(AgentRLError):
    """The run broke while it ran (exit 1)."""


class EngineError(RunFailedError):
    """The engine cannot serve at all: not a bad rollout, but the end of the run (exit 1)."""


class ConfigError(AgentRLError, ValueError):
    """A usage or configuration mistake (exit 2)."""

    exit_code = 2


class MissingError(AgentRLError):
    """The environment lacks something: a GPU, a package, a key, a model (exit 3)."""

    exit_code = 3


class DataError(AgentRLError, ValueError):
    """A data file is missing, empty or malformed (exit 4)."""

    exit_code = 4


class DivergedError(AgentRLError):
    """Training diverged (exit 5)."""

    exit_code = 5
