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
    parser.addoption(
        "--data-dir", default="../shared/data", help="folder of public data sets; their tests skip without it"
    )


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real public data sets; tests that need it are skipped where it is absent."""
    path = (request.config.invocation_params.dir / request.config.getoption("--data-dir")).resolve()
    if not path.is_dir():
        pytest.skip(f"no real data at {path}: pass --data-dir")
    return path
