"""The names of MARS's two agents."""

from __future__ import annotations

SYSTEM2, SYSTEM1 = "system2", "system1"
