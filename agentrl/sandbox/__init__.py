"""Model-written code, isolated by default."""

from agentrl.sandbox.sandbox import Limits, Result, Sandbox, Status

__all__ = ["Limits", "Result", "Sandbox", "Status"]
