"""`agentrl mars`: two roles of one model, deep research with a distilling System 1."""

from __future__ import annotations

from agentrl.cli.method import method_app

app = method_app("mars", "MARS: System 2 plans and calls tools, System 1 distils what they return.")
