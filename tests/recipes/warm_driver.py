"""Runs the command line in forked children, so that a test which kills many runs pays for the imports once.

A script: one JSON object per line in and out. {"args": [...], "cwd": ..., "log": ..., "env": {...}} forks a child in a
session of its own and answers its pid; {"wait": pid, "timeout": s} answers its exit status, null when it still runs.
A child ends as any Python does: `sys.exit` passes through the interpreter's own end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any

PRELOAD = ("torch", "transformers.models.llama.modeling_llama", "agentrl.recipes.mars.train", "agentrl.rollout.hf")


def child(request: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(request.get("env", {}))
    os.chdir(request["cwd"])
    sys.argv = ["agentrl", *request["args"]]
    from agentrl.cli import app

    app()


def status(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def main() -> None:
    for module in PRELOAD:
        importlib.import_module(module)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            answer: dict[str, Any] = {"code": status(request["wait"], request["timeout"])}
        else:
            pid = os.fork()
            if pid == 0:
                return child(request)
            answer = {"pid": pid}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
