"""The run folder: every file of a run is handed out and committed here.

A process killed at any moment leaves a readable folder: whole files appear by rename, growing files grow by whole
lines (a torn last line is ignored by every reader), and a checkpoint counts only with its manifest. Log a step's
metrics and commit its trajectories before its checkpoint, so that what a resumed run keeps is complete.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.files import (
    RunLock,
    append,
    encode,
    failed,
    read_lines,
    refused,
    replace_file,
    sync,
    sync_tree,
    whole_lines,
)
from agentrl.versions import git_commit, package_versions

MANIFEST = "manifest.json"
_STEP_FILE = re.compile(r"step_(\d{6,})(\.part)?\.jsonl")
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class ResumeState:
    """Where a resumed run goes on: after `step`, from the checkpoint `folder`, with the recipe's own `state`."""

    step: int
    folder: Path
    state: Mapping[str, Any]


def latest_checkpoint(run: Path, step: int | None = None) -> Path | None:
    """The newest whole checkpoint of a run folder, or that of `step`. A broken one counts as absent."""
    whole = whole_checkpoints(run)
    if step is not None:
        return whole.get(step)
    return whole[max(whole)] if whole else None


def whole_checkpoints(run: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint whose files all have the sizes that its manifest names."""
    found: dict[int, Path] = {}
    if (run / "checkpoints").is_dir():
        for folder in (run / "checkpoints").iterdir():
            match = _STEP_FOLDER.fullmatch(folder.name)
            if match and read_manifest(folder) is not None:
                found[int(match[1])] = folder
    return found


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest, or None when it is missing or does not fit the files."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        if all((folder / name).stat().st_size == size for name, size in manifest["files"].items()):
            return manifest
    except (OSError, ValueError, KeyError):
        return None
    return None


class Run:
    """An open run folder, locked for this process. Close it, or use it as a context manager."""

    def __init__(
        self, path: Path, seed: int, lock: RunLock, *, keep_last: int, keep_best: bool, resumed: bool, started: float
    ) -> None:
        self.path = path
        self.name = path.name
        self.seed = seed
        self.resumed = resumed
        self.resume_state: ResumeState | None = None
        self.set_aside: Path | None = None
        self.metrics_path = path / "metrics.jsonl"
        self.report_path = path / "report.html"
        self._keep_last, self._keep_best = keep_last, keep_best
        self._lock, self._started = lock, started
        for folder in ("trajectories", "evals", "checkpoints", "logs"):
            (path / folder).mkdir(exist_ok=True)
        numbers = [int(p.stem.removeprefix("attempt_")) for p in (path / "logs").glob("attempt_[0-9]*.log")]
        self.attempt = max(numbers, default=0) + 1
        self._handler = logging.FileHandler(path / "logs" / f"attempt_{self.attempt}.log", encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("agentrl")
        logger.addHandler(self._handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)

    @classmethod
    def create(
        cls,
        base_dir: Path | str,
        name: str | None,
        config_yaml: str,
        resume: bool = False,
        seed: int = 0,
        *,
        stem: str = "run",
        keep_last: int = 2,
        keep_best: bool = False,
        approve: Callable[[str, int], None] | None = None,
        can_resume: bool = True,
    ) -> Run:
        """Open `base_dir/name`; without a name, `stem` and the time of day, or on resume the newest run of `stem`.

        On resume everything after the newest whole checkpoint is dropped, but for the finished trajectories of the
        step that comes next (where the config is the same). `resume_state` says where to go on (None: from the start,
        with the metrics and trajectories of before, if any, in the folder `set_aside`). Before anything changes,
        `approve` sees the YAML that the run was last started with and its step (0: no checkpoint), and may raise.

        Raises `ConfigError` when the name is taken, unknown on resume, unusable, or in use by another process, and
        `RunFailedError` when the folder cannot be written.
        """
        base = Path(base_dir)
        if name is not None and (not name.strip() or name in (".", "..") or re.search(r"[/\\\0]", name)):
            raise ConfigError(f"run.name: {name!r} is not a folder name", "choose a --name without slashes")
        started = time.time()
        path = _existing(base, name, stem) if resume else _new(base, name, stem, can_resume)
        with contextlib.ExitStack() as undo:
            try:
                lock = RunLock(path / ".lock")
                undo.callback(lock.release)
                run = cls(path, seed, lock, keep_last=keep_last, keep_best=keep_best, resumed=resume, started=started)
                undo.callback(run.close)
                if resume:
                    run._find_checkpoint()
                    run._ask(approve)
                changed = run._replace_config(config_yaml)
                if resume:
                    run._rewind(reuse=not changed)
            except OSError as error:
                raise failed(path, error) from error
            undo.pop_all()
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the log and give the folder back. Safe to call twice."""
        logging.getLogger("agentrl").removeHandler(self._handler)
        self._handler.close()
        self._lock.release()

    # Files

    def write_file(self, name: str, data: str | bytes) -> Path:
        """Replace one file of the folder atomically. Raises `RunFailedError` naming the path."""
        path = self.path / name
        try:
            replace_file(path, data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
        except OSError as error:
            raise failed(path, error) from error
        return path

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one step's metrics, which must hold `step`, as one flushed line."""
        if "step" not in metrics:
            raise ValueError("metrics need a step")
        append(self.metrics_path, encode(metrics) + b"\n", durable=False)

    def write_summary(self, result: Mapping[str, Any]) -> Path:
        """Write `summary.json`: what the run is (name, seed, versions, commit, attempts, time), then `result`."""
        about = {
            "name": self.name,
            "seed": self.seed,
            "attempts": self.attempt,
            "time/attempt": time.time() - self._started,
            "versions": package_versions(),
            "git_commit": git_commit(),
        }
        pretty = json.dumps(json.loads(encode({**about, **result})), indent=2, ensure_ascii=False)
        return self.write_file("summary.json", pretty + "\n")

    # Trajectories

    def step_path(self, step: int, *, part: bool = False) -> Path:
        return self.path / "trajectories" / f"step_{step:06d}{'.part' if part else ''}.jsonl"

    def open_step(self, step: int, *, keep_part: bool = False) -> StepWriter:
        """Start a step's trajectories. `keep_part` goes on after those that `read_part` gave; else they are dropped."""
        part = self.step_path(step, part=True)
        kept = whole_lines(part.read_bytes()) if keep_part and part.exists() else []
        try:
            replace_file(part, b"".join(line + b"\n" for line in kept))
        except OSError as error:
            raise failed(part, error) from error
        return StepWriter(self.step_path(step), part)

    def read_part(self, step: int) -> list[dict[str, Any]]:
        """The finished trajectories of a step that broke, in the order they finished; a torn last line is left out."""
        return read_lines(self.step_path(step, part=True))

    # Checkpoints

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint's folder; broken ones are skipped."""
        return latest_checkpoint(self.path)

    @contextlib.contextmanager
    def checkpoint(
        self, step: int, *, state: Mapping[str, Any] | None = None, score: float | None = None
    ) -> Iterator[Path]:
        """Hand out a folder to fill; it becomes `checkpoints/step_NNNNNN` when the body ends without a fault.

        `state` is the recipe's own resume state (JSON); `score` is what `keep_best` compares, higher is better.
        Raises `RunFailedError` naming the path when the disk is full; the temporary folder is removed.
        """
        root = self.path / "checkpoints"
        final, temp = root / f"step_{step:06d}", root / f".tmp_step_{step:06d}"
        shutil.rmtree(temp, ignore_errors=True)
        try:
            temp.mkdir()
            yield temp
            (temp / "state.json").write_bytes(encode(state or {}))
            files = {str(p.relative_to(temp)): p.stat().st_size for p in sorted(temp.rglob("*")) if p.is_file()}
            (temp / MANIFEST).write_bytes(encode({"step": step, "score": score, "files": files}))
            sync_tree(temp)
            sync(self.metrics_path)
            _move_aside(final)
            temp.rename(final)
            sync(root)
            _point(root / "latest", final.name)
            self._prune()
        except Exception as error:
            # Writers report a full disk in several types (safetensors has its own), so the fault is told by content.
            if refused(error):
                raise failed(final, error) from error
            raise
        finally:
            shutil.rmtree(temp, ignore_errors=True)

    def _prune(self) -> None:
        whole = whole_checkpoints(self.path)
        keep = set(sorted(whole)[-self._keep_last :])
        if self._keep_best:
            scores = {step: (read_manifest(folder) or {}).get("score") for step, folder in whole.items()}
            known = [(score, step) for step, score in scores.items() if score is not None]
            keep |= {max(known)[1]} if known else set()
        newest = max(whole, default=-1)
        for folder in list((self.path / "checkpoints").iterdir()):
            match = _STEP_FOLDER.fullmatch(folder.name)
            if match and int(match[1]) not in keep and int(match[1]) < newest:
                _move_aside(folder)

    # Resume

    def _replace_config(self, config_yaml: str) -> bool:
        """Write config.yaml, keep one that said something else among the logs, and tell whether there was one."""
        path = self.path / "config.yaml"
        changed = path.exists() and path.read_text(encoding="utf-8") != config_yaml
        if changed:
            self.write_file(f"logs/config_before_attempt_{self.attempt}.yaml", path.read_bytes())
        self.write_file("config.yaml", config_yaml)
        return changed

    def _find_checkpoint(self) -> None:
        """Undo what a kill cut in the checkpoints, and set `resume_state` to the newest whole one."""
        root = self.path / "checkpoints"
        for left in root.glob(".old_step_*"):
            _restore_or_drop(left)
        for left in root.glob(".tmp_step_*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = self.latest_checkpoint()
        if folder is not None:
            step = int(folder.name.removeprefix("step_"))
            _point(root / "latest", folder.name)
            self.resume_state = ResumeState(step, folder, json.loads((folder / "state.json").read_bytes()))

    def _ask(self, approve: Callable[[str, int], None] | None) -> None:
        config = self.path / "config.yaml"
        if approve is not None and config.exists():
            approve(config.read_text(encoding="utf-8"), self.resume_state.step if self.resume_state else 0)

    def _rewind(self, *, reuse: bool) -> None:
        """Make the folder equal to that of a run that has just saved its newest whole checkpoint.

        With `reuse` the finished trajectories of the step after it are kept. Without a checkpoint the metrics and the
        trajectories of whole steps are set aside: nothing is left that they could be made from again.
        """
        step = self.resume_state.step if self.resume_state else -1
        if step < 0:
            self._set_aside()
        if self.metrics_path.exists():
            lines = [x for x in whole_lines(self.metrics_path.read_bytes()) if json.loads(x)["step"] <= step]
            replace_file(self.metrics_path, b"".join(line + b"\n" for line in lines))
        for path in list((self.path / "trajectories").iterdir()):
            match = _STEP_FILE.fullmatch(path.name)
            number = int(match[1]) if match else -1
            reusable = reuse and number == max(step, 0) + 1 if match and match[2] else 0 <= number <= step
            if path.is_file() and not reusable:
                path.unlink()

    def _set_aside(self) -> None:
        found = [p for p in (self.path / "trajectories").iterdir() if (m := _STEP_FILE.fullmatch(p.name)) and not m[2]]
        if self.metrics_path.exists() and self.metrics_path.stat().st_size:
            found.append(self.metrics_path)
        if found:
            self.set_aside = self.path / "logs" / f"before_attempt_{self.attempt}"
            self.set_aside.mkdir(exist_ok=True)
            for path in found:
                path.rename(self.set_aside / path.name)


class StepWriter:
    """The trajectories of one step: each is on disk as it finishes, and the file is committed in canonical order."""

    def __init__(self, final: Path, part: Path) -> None:
        self._final, self._part = final, part

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one finished trajectory to the `.part.jsonl` and wait until the disk has it."""
        append(self._part, encode(record) + b"\n", durable=True)

    def commit(self, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the step's file at once, ordered by (task_id, g, id) whatever finished first, and drop the part."""
        ordered = sorted(records, key=lambda r: (str(r["task_id"]), r.get("g", 0), str(r["id"])))
        try:
            replace_file(self._final, b"".join(encode(record) + b"\n" for record in ordered))
            self._part.unlink(missing_ok=True)
        except OSError as error:
            raise failed(self._final, error) from error
        return self._final


def _new(base: Path, name: str | None, stem: str, can_resume: bool) -> Path:
    way_on = "continue it with --resume, or choose another --name" if can_resume else "choose another --name"
    stamp = name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = base / (stamp if number == 1 else f"{stamp}-{number}")
            try:
                path.mkdir()  # atomic: of two processes with one name, one gets it
            except FileExistsError as error:
                if name is not None:
                    raise ConfigError(f"run {name!r} exists already at {path}", way_on) from error
            else:
                return path
    except OSError as error:
        raise failed(base / stamp, error) from error
    raise ConfigError(f"too many runs named {stamp}", "choose a --name")


def _existing(base: Path, name: str | None, stem: str) -> Path:
    if name is not None:
        if (base / name).is_dir():
            return base / name
        raise ConfigError(f"no run {name!r} in {base} to resume", "check --name and --run-dir, or drop --resume")
    pattern = re.compile(re.escape(stem) + r"-\d{8}-\d{6}(-\d+)?")
    runs = sorted(p for p in base.glob(f"{glob.escape(stem)}-*") if pattern.fullmatch(p.name))
    if not runs:
        raise ConfigError(f"no run of {stem!r} in {base} to resume", "name it with --name, or drop --resume")
    return runs[-1]


def _move_aside(folder: Path) -> None:
    """Remove a checkpoint so that a kill never leaves half of it under its own name."""
    if folder.exists():
        old = folder.with_name(f".old_{folder.name}")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _restore_or_drop(old: Path) -> None:
    """Undo a replacement that a kill cut between its two renames."""
    final = old.with_name(old.name.removeprefix(".old_"))
    if read_manifest(old) is not None and not final.exists():
        old.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _point(link: Path, target: str) -> None:
    temp = link.with_name(".latest.tmp")
    temp.unlink(missing_ok=True)
    temp.symlink_to(target)
    temp.replace(link)
