"""A prepared folder is whole or absent, whoever is killed and however many ask at once."""

from __future__ import annotations

import errno
import multiprocessing
import time
from pathlib import Path

import pytest

from agentrl.errors import MissingError
from agentrl.models.cache import home, install_folder


def _write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("AGENTRL_HOME")
    assert home() == Path.home() / ".cache" / "agentrl"


def test_a_made_folder_is_not_made_again(tmp_path: Path) -> None:
    install_folder(tmp_path / "m", _write)
    assert install_folder(tmp_path / "m", lambda folder: pytest.fail("made twice")) == tmp_path / "m"


def test_a_failing_maker_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _write(folder)
        raise MissingError("offline", "go online")

    with pytest.raises(MissingError, match="offline"):
        install_folder(tmp_path / "m", fail)
    assert [p.name for p in tmp_path.iterdir()] == [".m.lock"]


def test_a_full_disk_is_a_user_fault_that_names_the_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MissingError, match="AGENTRL_HOME") as caught:
        install_folder(tmp_path / "m", fail)
    assert str(tmp_path / "m") in caught.value.cause


def _make_slowly_for_ever(folder: Path) -> None:
    _write(folder)
    (folder.parent / "started").touch()
    time.sleep(60)


def test_a_killed_maker_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=install_folder, args=(tmp_path / "m", _make_slowly_for_ever)
    )
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (tmp_path / "m").exists()
    assert len(list(tmp_path.glob(".m.tmp-*"))) == 1
    install_folder(tmp_path / "m", _write)
    assert not list(tmp_path.glob(".m.tmp-*"))
    assert (tmp_path / "m" / "config.json").is_file()


def _count(folder: Path) -> None:
    with (folder.parent / "made").open("a") as handle:
        handle.write("x")
    time.sleep(0.2)
    _write(folder)


def test_processes_that_ask_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=install_folder, args=(tmp_path / "m", _count)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "made").read_text() == "x"
