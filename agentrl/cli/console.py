"""The only module that prints: results to stdout, notes and faults to stderr.

`--json` leaves stdout to one JSON object: while a command body runs, everything else that is written there, also by
libraries and child processes, goes to stderr. `--quiet` drops notes and progress, never results or faults.
"""

from __future__ import annotations

import errno
import json as _json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

import typer

from agentrl.errors import AgentRLError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

INTERRUPTED = 130
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Mode:
    """How the current command talks. Under `--json` the values for stdout wait in `pending` until the body ends."""

    quiet: bool = False
    json_output: bool = False
    debug: bool = False
    pending: list[object] = field(default_factory=list)


_MODE: ContextVar[Mode | None] = ContextVar("agentrl_console_mode", default=None)


def mode() -> Mode:
    """The current command's mode; outside of a command the plain one."""
    return _MODE.get() or Mode()


def clean(text: str) -> str:
    """Text with terminal control characters made visible: what a model wrote must not drive the terminal."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def open_closed_streams() -> None:
    """Give a command that was started with stdin, stdout or stderr closed (`>&-`) an empty one in its place: what it
    prints is dropped, and no file that it opens later gets the descriptor."""
    for name, flag, kind in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flag), kind))


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def out(text: str = "") -> None:
    """A line of the command's result: stdout, or stderr under `--json`."""
    _write(sys.stderr if mode().json_output else sys.stdout, clean(text))


def note(text: str) -> None:
    """A remark beside the result: stderr, dropped by `--quiet`."""
    if not mode().quiet:
        _write(sys.stderr, clean(text))


def err(text: str) -> None:
    """A line of a fault: stderr, always."""
    _write(sys.stderr, clean(text))


def json(value: object) -> None:
    """One JSON object on stdout. Values that JSON does not know are written as text."""
    if mode().json_output:
        mode().pending.append(value)
    else:
        _write(sys.stdout, _json.dumps(value, indent=2, ensure_ascii=False, default=str))


def rich_console(stream: TextIO | None = None) -> Console:
    """A rich console on `stream` (stdout by default); rich itself honours NO_COLOR."""
    from rich.console import Console

    target = stream or (sys.stderr if mode().json_output else sys.stdout)
    width = None if target.isatty() else int(os.environ.get("COLUMNS", "0")) or 160
    return Console(file=target, width=width, highlight=False, soft_wrap=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """A table on stdout: ruled on a terminal, tab-separated lines in a pipe."""
    stream = sys.stderr if mode().json_output else sys.stdout
    if not stream.isatty():
        for row in ([*columns], *rows):
            _write(stream, "\t".join(clean(str(cell)).replace("\n", " ").replace("\t", " ") for cell in row))
        return
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(str(cell))) for cell in row))
    rich_console(stream).print(grid)


def styled(parts: Sequence[tuple[str, str]]) -> None:
    """One line of (text, rich style) parts on stdout; plain where colour is off."""
    from rich.text import Text

    text = Text()
    for part, style in parts:
        text.append(clean(part), style)
    rich_console().print(text, soft_wrap=True)


def fault(cause: str, fix: str) -> None:
    """The two lines of every failure: its cause and its fix."""
    err("error: " + " ".join(cause.split("\n")))
    err("fix: " + " ".join(fix.split("\n")))


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send file descriptor 1, and so also what libraries and children write, to stderr for a while."""
    sys.stdout.flush()
    python_stdout, saved = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        python_stdout.flush()
        sys.stdout = python_stdout
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def session(*, quiet: bool = False, json_output: bool = False, debug: bool = False) -> Iterator[None]:
    """A command body: sets the mode, and turns faults into lines, JSON and exit codes.

    Raises `SystemExit` with the codes of the CLI contract: the fault's own, 1 for an unexpected exception, 130 for an
    interrupt. `typer.Exit` and usage faults of typer pass through.
    """
    current = Mode(quiet, json_output, debug)
    token = _MODE.set(current)
    code, problems = 0, list[tuple[str, str]]()
    passing: BaseException | None = None
    try:
        with _stdout_on_stderr() if json_output else nullcontext():
            yield
    except AgentRLError as error:
        code, problems = error.exit_code, list(error.faults)
        _trace(debug)
    except KeyboardInterrupt:
        code, problems = INTERRUPTED, [("interrupted", "run the same command again; a train goes on with --resume")]
        _trace(debug)
    except BrokenPipeError:
        # The reader went away (`| head`): nothing is left to tell it, and the flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    except (SystemExit, typer.Exit, typer.Abort, typer.BadParameter) as error:
        passing = error
    except OSError as error:
        code, problems = _system_fault(error)
        _trace(debug)
    except Exception as error:  # noqa: BLE001 - the outermost frame: every fault becomes one line and an exit code
        code, problems = 1, [_unexpected(error)]
        _trace(debug)
    finally:
        _MODE.reset(token)
    _report(code, problems, current)
    if passing is not None:
        raise passing
    if code:
        raise SystemExit(code)


def _system_fault(error: OSError) -> tuple[int, list[tuple[str, str]]]:
    """A path that is too long for the system is the user's own; everything else is unexpected."""
    if error.errno != errno.ENAMETOOLONG:
        return 1, [_unexpected(error)]
    name = str(error.filename)
    return 2, [(f"a path of {len(name)} characters is too long: {name[:60]}...", "give a shorter one")]


def _unexpected(error: Exception) -> tuple[str, str]:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}", "run again with --debug for the full trace"


def usage_fault(error: typer.TyperException, *, json_output: bool) -> None:
    """A fault in how the command was written; a bare group prints its help instead."""
    message = error.format_message().replace(": Value error, ", ": ")  # typer's words for a choice that is none
    if "\n\n" in message:
        err(message)
        return
    context = getattr(error, "ctx", None)  # only usage faults have one
    path = context.command_path if context is not None else "agentrl"
    _report(error.exit_code, [(message, f"`{path} --help` shows what it takes")], Mode(json_output=json_output))


def _trace(debug: bool) -> None:
    if debug:
        err(traceback.format_exc().rstrip())


def _report(code: int, problems: Sequence[tuple[str, str]], current: Mode) -> None:
    """The faults' lines on stderr and, under `--json`, the one object on stdout, with the faults in it."""
    for cause, fix in problems:
        fault(cause, fix)
    if not current.json_output or not (current.pending or problems):
        return
    value = current.pending[-1] if current.pending else {}
    if problems:
        causes = [{"cause": cause, "fix": fix} for cause, fix in problems]
        error = {"exit_code": code, **causes[0], "problems": causes}
        value = {**value, "error": error} if isinstance(value, dict) else {"result": value, "error": error}
    json(value)


class StepTable:
    """Progress of a run: a live table with the time left on a terminal, one line per step in a pipe.

    Use as a context manager around the loop; `begin` names the steps, `phase` says what a step is doing,
    `log` (the `Tracker` protocol) takes a finished step's metrics. It writes to stderr; `--quiet` mutes it.
    """

    COLUMNS: Mapping[str, str] = MappingProxyType(
        {
            "reward/mean": "reward",
            "eval/score": "held-out",
            "loss": "loss",
            "grad_norm": "grad",
            "kl/mismatch": "gap",
            "tokens/s": "tokens/s",
            "time/rollout": "rollout s",
            "time/update": "update s",
            "time/total": "total s",
        }
    )
    ROWS = 12

    def __init__(self, columns: Mapping[str, str] = COLUMNS) -> None:
        """`columns`: metric -> how it is headed. A metric that a step does not have is left out."""
        self._columns = dict(columns)
        self._rows: list[tuple[int, Mapping[str, float | None]]] = []
        self._first, self._total = 1, 0
        self._started = time.monotonic()
        self._phase = ""
        self._live: Live | None = None

    def __enter__(self) -> StepTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, total: int, first: int = 1) -> None:
        """The run goes from step `first` to step `total`, both included."""
        self._first, self._total, self._started = first, total, time.monotonic()
        if mode().quiet or not sys.stderr.isatty():
            return
        from rich.live import Live

        self._live = Live(self._render(), console=rich_console(sys.stderr), refresh_per_second=4, transient=False)
        self._live.start()

    def phase(self, name: str, done: int = 0, of: int = 0) -> None:
        """What the current step is doing, with a count where there is one. Shown on a terminal only."""
        self._phase = f"{name} {done}/{of}" if of else name
        self._refresh()

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._rows.append((step, dict(metrics) | _speed(metrics)))
        self._phase = ""
        self._refresh()
        if self._live is None:
            row = self._rows[-1][1]
            shown = [
                f"{head} {_number(row[name])}" for name, head in self._columns.items() if row.get(name) is not None
            ]
            note(f"step {step}/{self._total}  " + "  ".join([*shown, f"left {self.time_left()}"]))

    def note(self, text: str) -> None:
        """A remark between steps, above the live table."""
        if self._live is None:
            note(text)
        else:
            self._live.console.print(clean(text), markup=False)

    def close(self) -> None:
        if self._live is not None:
            self._refresh()
            self._live.stop()
            self._live = None

    def time_left(self) -> str:
        """Estimate from the mean of this attempt's steps; `?` before the first one."""
        done = len(self._rows)
        if not done:
            return "?"
        rest = max(0, self._total - self._rows[-1][0])
        seconds = round((time.monotonic() - self._started) / done * rest)
        hours, seconds = divmod(seconds, 3600)
        return f"{hours}:{seconds // 60:02d}:{seconds % 60:02d}"

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table()
        rows = self._rows[-self.ROWS :]
        # A metric that no step has gets no column, once there is a step.
        shown = [c for c in self._columns if not rows or any(metrics.get(c) is not None for _, metrics in rows)]
        for name in ("step", *(self._columns[c] for c in shown)):
            grid.add_column(name, justify="right")
        for step, metrics in rows:
            grid.add_row(str(step), *(_number(metrics.get(c)) for c in shown))
        last = self._rows[-1][0] if self._rows else self._first - 1
        line = Text(f"step {min(last + 1, self._total)} of {self._total}  {self._phase}  left {self.time_left()}")
        # The bar ends without a line break, so it stands last.
        return Group(grid, line, ProgressBar(total=max(1, self._total), completed=last, width=60))


def _speed(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Sampled tokens per second of rolling out, where something was sampled."""
    tokens, seconds = metrics.get("tokens/generated"), metrics.get("time/rollout")
    return {"tokens/s": tokens / seconds} if tokens and seconds else {}


def _number(value: float | None) -> str:
    """Three or four digits; a whole number as it is."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
