"""The run folder survives kills, torn files, a full disk and a second process."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, RunFailedError
from agentrl.files import encode, read_lines
from agentrl.run import Run, latest_checkpoint


def _record(task: str, g: int = 0, **more: object) -> dict[str, object]:
    return {"id": f"{task}/{g}", "task_id": task, "g": g, **more}


def _save(run: Run, step: int, text: str = "weights", **kwargs: object) -> None:
    with run.checkpoint(step, **kwargs) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_text(text)


def _train(run: Run, last: int, save_every: int = 2) -> None:
    first = run.resume_state.step + 1 if run.resume_state else 1
    for step in range(first, last + 1):
        writer = run.open_step(step)
        records = [_record("b", 0, step=step), _record("a", 1, step=step), _record("a", 0, step=step)]
        for record in records:
            writer.add(record)
        writer.commit(records)
        run.log_metrics({"step": step, "loss": 1 / step})
        if step % save_every == 0:
            _save(run, step, state={"version": step})


def test_a_name_that_exists_is_refused_and_the_message_names_resume_and_name(tmp_path: Path) -> None:
    Run.create(tmp_path, "a", "method: mars\n").close()
    with pytest.raises(ConfigError, match="exists") as caught:
        Run.create(tmp_path, "a", "method: mars\n")
    assert "--resume" in caught.value.fix
    assert "--name" in caught.value.fix


def test_resuming_a_run_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run 'a'"):
        Run.create(tmp_path, "a", "", resume=True)
    with pytest.raises(ConfigError, match="no run of 'hle'"):
        Run.create(tmp_path, None, "", resume=True, stem="hle")


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "../x", "a\\b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        Run.create(tmp_path, name, "")
    assert not list(tmp_path.iterdir())


def test_runs_without_a_name_get_the_stem_and_time_and_resume_takes_the_newest(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        with Run.create(tmp_path, None, "", stem="hle") as run:
            names.append(run.name)
    assert len(set(names)) == 2
    assert all(name.startswith("hle-2") for name in names)
    with Run.create(tmp_path, None, "", resume=True, stem="hle") as run:
        assert run.name == max(names)
    with pytest.raises(ConfigError):
        Run.create(tmp_path, None, "", resume=True, stem="hl")


def test_two_processes_never_share_a_run(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", ""):
        code = f"from agentrl.run import Run; Run.create({str(tmp_path)!r}, 'a', '', resume=True)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode != 0
        assert f"in use by process {os.getpid()}" in done.stderr
        with pytest.raises(ConfigError, match="in use"):
            Run.create(tmp_path, "a", "", resume=True)
    Run.create(tmp_path, "a", "", resume=True).close()


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_run_locked(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, sys, time
        from agentrl.run import Run
        run = Run.create({str(tmp_path)!r}, "a", "")
        child = os.fork()
        if child == 0:
            print(os.getpid(), flush=True)
            time.sleep(60)
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        Run.create(tmp_path, "a", "", resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    with Run.create(tmp_path, "whole", "x") as run:
        _train(run, 8)
    with Run.create(tmp_path, "broken", "x") as run:
        _train(run, 5)
        run.open_step(6).add(_record("a"))
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')
    with Run.create(tmp_path, "broken", "x", resume=True) as run:
        assert run.resume_state is not None
        assert run.resume_state.step == 4
        assert run.resume_state.state == {"version": 4}
        assert [m["step"] for m in read_lines(run.metrics_path)] == [1, 2, 3, 4]
        assert not run.step_path(5).exists()
        _train(run, 8)
        assert run.attempt == 2
    whole, broken = (
        {
            str(p.relative_to(tmp_path / name)): p.read_bytes()
            for p in (tmp_path / name).rglob("*")
            if p.is_file() and p.parent.name != "logs" and p.name != ".lock"
        }
        for name in ("whole", "broken")
    )
    assert whole == broken


def test_a_run_without_a_checkpoint_starts_again_from_nothing(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "") as run:
        run.log_metrics({"step": 0, "eval": 1})
        _train(run, 1)
    with Run.create(tmp_path, "a", "", resume=True) as run:
        assert run.resume_state is None
        assert not read_lines(run.metrics_path)
        assert not list((run.path / "trajectories").iterdir())


def test_finished_trajectories_of_the_broken_step_are_reused_and_a_torn_one_is_not(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "") as run:
        _train(run, 2)
        writer = run.open_step(3)
        writer.add(_record("a"))
        writer.add(_record("b"))
        part = run.step_path(3, part=True)
        part.write_bytes(part.read_bytes()[:-7])
    with Run.create(tmp_path, "a", "", resume=True) as run:
        kept = run.read_part(3)
        assert [r["task_id"] for r in kept] == ["a"]
        writer = run.open_step(3, keep_part=True)
        writer.add(_record("c"))
        assert [r["task_id"] for r in run.read_part(3)] == ["a", "c"]
        writer.commit([*kept, _record("c")])
        assert [r["task_id"] for r in read_lines(run.step_path(3))] == ["a", "c"]
        assert not part.exists()
        run.open_step(4).add(_record("old"))
        run.open_step(4)
        assert run.read_part(4) == []


@pytest.mark.parametrize("broken_step", [4, 3])
def test_a_part_that_other_weights_or_another_config_sampled_is_not_reused(tmp_path: Path, broken_step: int) -> None:
    with Run.create(tmp_path, "a", "lr: 1") as run:
        _train(run, 2)
        run.open_step(broken_step).add(_record("a"))
    config = "lr: 1" if broken_step == 4 else "lr: 2"
    with Run.create(tmp_path, "a", config, resume=True) as run:
        assert run.read_part(broken_step) == []
        assert (run.path / "config.yaml").read_text() == config
        if broken_step == 3:
            assert (run.path / "logs" / "config_before_attempt_2.yaml").read_text() == "lr: 1"


def test_a_step_is_committed_in_canonical_order_whatever_finished_first(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "") as run:
        records = [_record("b"), _record("a", 10), _record("a", 2)]
        run.open_step(1).commit(records)
        first = run.step_path(1).read_bytes()
        run.open_step(1).commit(reversed(records))
        assert run.step_path(1).read_bytes() == first
        assert [json.loads(line)["id"] for line in first.splitlines()] == ["a/2", "a/10", "b/0"]
        assert run.step_path(1).name == "step_000001.jsonl"


def test_checkpoints_are_pruned_but_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "", keep_last=2, keep_best=True) as run:
        for step, score in [(1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, None)]:
            _save(run, step, score=score)
        assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == [
            "latest",
            "step_000002",
            "step_000004",
            "step_000005",
        ]
        assert (run.path / "checkpoints" / "latest").resolve().name == "step_000005"
        assert latest_checkpoint(run.path, 4) == run.path / "checkpoints" / "step_000004"
        assert latest_checkpoint(run.path, 3) is None


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest", "no manifest"])
def test_a_broken_checkpoint_is_skipped_and_latest_is_repaired(tmp_path: Path, damage: str) -> None:
    with Run.create(tmp_path, "a", "") as run:
        _train(run, 4)
        folder = run.path / "checkpoints" / "step_000004"
        weights, manifest = folder / "policy" / "model.safetensors", folder / "manifest.json"
        if damage == "truncate":
            weights.write_text("wei")
        elif damage == "delete":
            weights.unlink()
        elif damage == "manifest":
            manifest.write_bytes(manifest.read_bytes()[:10])
        else:
            manifest.unlink()
        assert run.latest_checkpoint() == run.path / "checkpoints" / "step_000002"
    with Run.create(tmp_path, "a", "", resume=True) as run:
        assert run.resume_state is not None
        assert run.resume_state.step == 2
        assert (run.path / "checkpoints" / "latest").resolve().name == "step_000002"
        _train(run, 4)
        assert run.latest_checkpoint() == folder


def test_pruning_never_counts_a_broken_checkpoint_as_one_to_keep(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "", keep_last=2) as run:
        for step in (1, 2):
            _save(run, step)
        (run.path / "checkpoints" / "step_000002" / "manifest.json").unlink()
        _save(run, 3)
        assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["latest", "step_000001", "step_000003"]


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_temporary_folder(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "") as run:
        _save(run, 1)
        with pytest.raises(KeyError), run.checkpoint(2):
            raise KeyError("x")
        with pytest.raises(RunFailedError, match=r"step_000002.*No space"), run.checkpoint(2):
            Path("/dev/full").write_text("x" * 100_000)
        with pytest.raises(RunFailedError, match="step_000002"), run.checkpoint(2):
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["latest", "step_000001"]


def test_a_replacement_cut_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "") as run:
        _save(run, 1)
        root = run.path / "checkpoints"
        (root / "step_000001").rename(root / ".old_step_000001")
        (root / ".tmp_step_000001").mkdir()
    with Run.create(tmp_path, "a", "", resume=True) as run:
        assert run.resume_state is not None
        assert run.resume_state.step == 1
        assert sorted(p.name for p in root.iterdir()) == ["latest", "step_000001"]


def test_saving_a_step_twice_replaces_it(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "") as run:
        _save(run, 1, "old")
        _save(run, 1, "new!")
        latest = run.latest_checkpoint()
        assert latest is not None
        assert (latest / "policy" / "model.safetensors").read_text() == "new!"


def test_a_full_disk_names_the_path_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run.create(tmp_path, "a", "") as run:
        run.metrics_path.symlink_to("/dev/full")
        with pytest.raises(RunFailedError, match=r"metrics\.jsonl: No space left"):
            run.log_metrics({"step": 1})
        writer = run.open_step(1)
        writer.add(_record("a"))
        real, left = os.write, [20]

        def write(fd: int, data: bytes) -> int:
            if left[0] <= 0:
                raise OSError(28, "No space left on device")
            done = real(fd, data[: left[0]])
            left[0] -= done
            return done

        monkeypatch.setattr(os, "write", write)
        with pytest.raises(RunFailedError, match=r"part\.jsonl"):
            writer.add(_record("b"))
        monkeypatch.undo()
        assert len(run.step_path(1, part=True).read_bytes().splitlines()) == 1
        writer.add(_record("c"))
        assert [r["task_id"] for r in run.read_part(1)] == ["a", "c"]


def test_not_a_number_is_written_as_null_and_odd_text_reads_back() -> None:
    value = {"loss": float("nan"), "x": [float("inf"), 1.5], "t": "a\u2028b\ud800\x1b\n", "p": ("y",)}
    line = encode(value)
    assert b"NaN" not in line
    assert b"Infinity" not in line
    assert b"\n" not in line
    assert json.loads(line) == {"loss": None, "x": [None, 1.5], "t": "a\u2028b\ud800\x1b\n", "p": ["y"]}


def test_the_summary_holds_versions_seed_attempts_and_the_result(tmp_path: Path) -> None:
    with Run.create(tmp_path, "a", "", seed=7) as run:
        run.write_summary({"rise": {"value": float("nan")}})
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["seed"] == 7
    assert summary["rise"] == {"value": None}
    assert summary["attempts"] == 1
    assert {"python", "numpy"} <= set(summary["versions"])
    assert "git_commit" in summary


def test_each_attempt_logs_to_its_own_file(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with Run.create(tmp_path, "a", "", resume=attempt == 2):
            logging.getLogger("agentrl.test").info("attempt %d", attempt)
    logging.getLogger("agentrl.test").info("after")
    logs = tmp_path / "a" / "logs"
    assert "attempt 1" in (logs / "attempt_1.log").read_text()
    assert (logs / "attempt_2.log").read_text().endswith("attempt 2\n")


_LOOP = """
import sys
from agentrl.run import Run
base, resume = sys.argv[1], sys.argv[2] == "1"
run = Run.create(base, "a", "x", resume=resume, keep_last=2)
first = run.resume_state.step + 1 if run.resume_state else 1
print("ready", flush=True)
for step in range(first, 100000):
    writer = run.open_step(step)
    records = [{"id": f"{t}", "task_id": t, "g": 0, "text": "x" * 20000} for t in "dcba"]
    for record in records:
        writer.add(record)
    writer.commit(records)
    run.log_metrics({"step": step, "text": "y" * 5000})
    with run.checkpoint(step, state={"step": step}) as folder:
        (folder / "weights").write_bytes(bytes(200000))
"""


def test_kill_9_at_any_moment_leaves_a_readable_folder_that_resumes(tmp_path: Path) -> None:
    reached = 0
    for attempt in range(12):
        command = [sys.executable, "-c", _LOOP, str(tmp_path), "1" if attempt else "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.01 + 0.0137 * attempt)
        process.kill()
        process.wait()
        process.stdout.close()
        run = tmp_path / "a"
        newest = latest_checkpoint(run)
        saved = int(newest.name.removeprefix("step_")) if newest else 0
        assert saved >= reached
        reached = saved
        steps = [m["step"] for m in read_lines(run / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= saved
        for path in (run / "trajectories").glob("step_??????.jsonl"):
            assert [json.loads(x)["task_id"] for x in path.read_bytes().splitlines()] == ["a", "b", "c", "d"]
    assert reached > 0
    with Run.create(tmp_path, "a", "x", resume=True) as opened:
        assert opened.resume_state is not None
        assert opened.resume_state.state == {"step": reached}
        assert [m["step"] for m in read_lines(opened.metrics_path)] == list(range(1, reached + 1))
