"""What `check` says of a recipe's GPUs."""

from __future__ import annotations

import pytest

from agentrl.launch.devices import GIB, Gpu, Hardware
from agentrl.preflight.check import check
from agentrl.recipes.registry import load_recipe


def test_more_gpus_than_this_version_trains_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(i, "NVIDIA X", 80 * GIB, (9, 0)) for i in range(8))
    monkeypatch.setattr("agentrl.launch.devices.detect", lambda: Hardware(16, 128 * GIB, True, gpus, "13.0"))
    errors = [f for f in check(load_recipe("hle")) if f.key == "launch.gpus"]
    assert [(f.message, f.exit_code) for f in errors] == [("8 GPUs are here, but this version trains on one", 3)]
    assert not [f for f in check(load_recipe("hle", ["launch.gpus=1"])) if f.key == "launch.gpus"]


def test_a_gpu_for_each_trainer_rank_is_no_fault_and_more_are(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(i, "NVIDIA X", 80 * GIB, (9, 0)) for i in range(8))
    monkeypatch.setattr("agentrl.launch.devices.detect", lambda: Hardware(16, 128 * GIB, True, gpus, "13.0"))
    own = load_recipe("hle", ["launch.gpus=2", "launch.ranks=2"])
    assert not [f for f in check(own) if f.key in ("launch.gpus", "launch.ranks")]
    errors = [f for f in check(load_recipe("hle", ["launch.gpus=4", "launch.ranks=2"])) if f.key == "launch.gpus"]
    assert [(f.message, f.fix) for f in errors] == [
        ("4 GPUs are here, but the 2 trainer ranks use 2 of them", "set launch.gpus: 2, or --smoke")
    ]
