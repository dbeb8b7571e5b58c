"""`agentrl mappa`: teams of agents with weights of their own, trained by a coach's score of every action."""

from __future__ import annotations

from agentrl.cli.method import method_app

app = method_app("mappa", "MAPPA: a team of agents, each action scored by a coach, each agent with its own weights.")
