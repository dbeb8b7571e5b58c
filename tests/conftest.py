"""Shared fixtures: the tests are offline and run on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Wall time on a shared machine says nothing about an example, and a default run must be repeatable.
settings.register_profile("agentrl", deadline=None, derandomize=True, database=None)
settings.load_profile("agentrl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data-dir", default=None, help="folder of public data sets; their tests skip without it")


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real public data sets; tests that need it are skipped where it is absent."""
    given = request.config.getoption("--data-dir")
    if given is None:
        pytest.skip("no folder of real data: pass --data-dir")
    path = (request.config.invocation_params.dir / given).resolve()
    assert path.is_dir(), f"--data-dir: there is no folder {path}"
    return path
