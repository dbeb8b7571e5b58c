"""`agentrl doctor`: is this machine fit to run?"""

from __future__ import annotations

from agentrl.cli import console
from agentrl.errors import MissingError


def doctor(json_output: bool = False, fix: bool = False) -> int:
    """Print one row per question. Returns 0, or the exit code for a broken environment (3).

    `fix` first removes torchvision and its companions where they break transformers; it changes nothing else.
    """
    from agentrl.preflight.doctor import examine, repair

    removed = repair() if fix else ()
    report = examine()
    if json_output:
        console.json({**report.to_json(), "removed": list(removed)})
        return 0 if report.ok else MissingError.exit_code
    if fix:
        console.out(f"removed: {', '.join(removed)}" if removed else "nothing to repair by --fix")
    console.table(("check", "status", "detail"), [(row.name, row.status, row.detail) for row in report.rows])
    for row in report.rows:
        if row.fix is not None:
            console.out(f"{row.name}: fix: {row.fix}")
    broken = sum(row.status == "broken" for row in report.rows)
    console.out("all is well" if not broken else f"{broken} broken")
    return 0 if report.ok else MissingError.exit_code
