"""A greedy recipe over three questions, and what its evaluations left on disk."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = [
    ("a", "How many apples are left?", "3"),
    ("b", "What is the capital?", "4"),
    ("c", "Who lives there?", "5"),
]
TEXT_TOKENS, MESSAGE, STEPS, ROUNDS = 6, 5, 4, 2
ROLLOUTS = 3 * ROUNDS - 1


def records(result, name):
    run = Path(result["run"])
    path = run / ("trajectories/step_000000.jsonl" if name == "ring" else f"evals/{name}.jsonl")
    return {r["task_id"]: r for r in map(json.loads, path.read_text("utf-8").splitlines())}
