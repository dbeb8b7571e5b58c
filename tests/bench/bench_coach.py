"""How near the coach's calls come to the ideal time: every place of the limit full, nothing else but the waiting.

    python tests/bench/bench_coach.py [--actions 256] [--limit 32] [--latency 1.0]

The real client against a server on loopback in a process of its own, which answers each call after the latency. Goal:
at most 1.1 times the ideal, actions / limit * latency. The best of --repeats counts; exits 1 when the goal is missed.
That no place stays empty is a test (tests/scoring/test_coach.py), without a clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.config.schema import CoachConfig
from agentrl.protocols import CoachView
from agentrl.scoring.coach import make_coach
from agentrl.types import Task

GOAL = 1.1
VIEW = CoachView(Task("t", "How much is 6 times 7?", ("42",)), "verifier", "You verify.", "6 * 7 = 42", "", None)


def serve(latency_s: float, pipe: Connection) -> None:
    """In a process of its own: tell the address, then answer until the driver hangs up."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scoring"))
    import fake_openai

    def answer(number: int, body: dict[str, Any]) -> Any:
        return 200, json.dumps({"analysis": "fine", "score": 7})

    with fake_openai.serving(answer, latency_s) as fake:
        pipe.send(fake.url)
        try:
            pipe.recv()
        except EOFError:
            return


async def seconds(url: str, actions: int, limit: int) -> float:
    config = CoachConfig(kind="endpoint", model="fake", base_url=url, max_concurrent=limit)
    coach = make_coach(config, load=lambda key, target: None)
    await coach.score(VIEW)  # the first call imports the client library
    views = [replace(VIEW, action=f"action {i} " + "x" * 2_000) for i in range(actions)]
    start = time.perf_counter()
    scores = await asyncio.gather(*(coach.score(view) for view in views))
    took = time.perf_counter() - start
    await coach.close()
    assert all(score.value == 7.0 for score in scores)
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=256)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--latency", type=float, default=1.0, help="seconds that the server takes for an answer")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(args.latency, theirs))
    server.start()
    theirs.close()
    url = ours.recv()
    ideal = -(-args.actions // args.limit) * args.latency
    took = [asyncio.run(seconds(url, args.actions, args.limit)) for _ in range(args.repeats)]
    ours.close()
    server.join()
    ratio = min(took) / ideal
    row = {
        "actions": args.actions,
        "limit": args.limit,
        "ideal_s": ideal,
        "seconds": took,
        "ratio": ratio,
        "goal": GOAL,
    }
    sys.stdout.write(json.dumps(row) + "\n")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
