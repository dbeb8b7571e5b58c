"""What lies below a folder that this user may not read is not there, and `check` says so."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from agentrl.preflight.check import check
from agentrl.recipes.registry import load_recipe


@pytest.fixture
def sealed(tmp_path, monkeypatch) -> str:
    """A folder below which nothing can be looked up, also for root, who may read everything."""
    folder, stat = str(tmp_path / "sealed"), os.stat
    os.mkdir(folder)

    def refusing(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if not isinstance(path, int) and os.fsdecode(path).startswith(folder + os.sep):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refusing)
    return folder


@pytest.mark.parametrize(
    ("key", "cause"),
    [
        ("run.dir", None),
        ("data.path", "there is no file and no embedded set"),
        ("data.eval.path", "there is no file and no embedded set"),
        ("model.name", "sealed/x"),
        ("model.checkpoint", "there is no run or folder"),
        ("tools.search.corpus", "there is no file and no embedded corpus"),
    ],
)
def test_a_path_below_an_unreadable_folder_is_a_finding_at_most(sealed, key, cause):
    loaded = load_recipe("smoke/mars", [f"{key}={sealed}/x"])
    found = [finding for finding in check(loaded) if finding.key == key and finding.level == "error"]
    assert [cause in finding.message for finding in found] == ([True] if cause else [])
