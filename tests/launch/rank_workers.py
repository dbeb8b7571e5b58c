"""What the workers of `test_distributed.py` do, and a driver of its own for the ways in which one can end."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from agentrl.errors import ConfigError
from agentrl.launch.distributed import Group, Member


def obedient(member: Member) -> None:
    """Does what its orders say."""
    member.send("ready")
    for order, *given in member.orders():
        if order == "echo":
            member.send((member.rank, *given))
        elif order == "add":
            member.add_to_first([torch.full((3,), float(member.rank), dtype=given[0])])
        elif order == "spread":
            tensor = torch.zeros(5, dtype=given[0])
            member.spread_first([tensor])
            member.send(tensor)
        elif order == "refuse":
            raise ConfigError("the rank's cause", "the rank's fix")
        elif order == "break":
            raise ZeroDivisionError("no\nluck")
        elif order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == "die between":
            member.send(None)
            next(member.orders())
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == "dawdle":
            time.sleep(600)


def stillborn(member: Member) -> None:
    os._exit(7)


def main() -> None:
    # A shell's background job starts with SIGINT ignored, and hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = Group.start(2, obedient)
    group.send([("dawdle",)])
    print("ready", *group.pids, flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("the run broke")
    if sys.argv[1] == "close":
        group.close()
    elif sys.argv[1] == "meet":
        group.meet()
    elif sys.argv[1] != "forget":
        time.sleep(600)


if __name__ == "__main__":
    main()
