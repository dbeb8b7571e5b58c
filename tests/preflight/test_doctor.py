"""The doctor names what is broken, says how to mend it, and is never brought down by it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli import doctor as doctor_command
from agentrl.errors import MissingError
from agentrl.launch.devices import GIB, Gpu, Hardware
from agentrl.models import resolve
from agentrl.preflight import doctor, packages
from agentrl.preflight.doctor import Report, Row, run_check

VERSIONS = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Set what is installed and whether torchvision imports; returns the list of commands that get run."""

    def set_up(versions: dict[str, str], torchvision_error: str | None, returncode: int = 0) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, returncode, "", "ERROR: read-only file system")

        monkeypatch.setattr(doctor, "installed_version", versions.get)
        monkeypatch.setattr(doctor, "import_error", lambda _: torchvision_error)
        monkeypatch.setattr(doctor.subprocess, "run", run)
        return commands

    return set_up


NMS = "RuntimeError: operator torchvision::nms does not exist"


def test_fix_removes_the_installed_ones_of_the_trio_where_torchvision_breaks(machine: Callable) -> None:
    commands = machine(VERSIONS, NMS)
    assert doctor.check_torchvision()[0].status == "broken"
    assert doctor.check_torchvision()[0].fix == "agentrl doctor --fix"
    assert doctor.repair() == ("torchvision", "torchaudio")
    assert commands == [[sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", "torchvision", "torchaudio"]]


@pytest.mark.parametrize(
    ("versions", "error"),
    [
        (VERSIONS, None),  # it works
        ({"torch": "2.13.0+cpu", "torchaudio": "2.11.0"}, NMS),  # torchvision is not there
        ({**VERSIONS, "torch": "2.13.0"}, NMS),  # beside a GPU torch the user has to choose
    ],
)
def test_fix_removes_nothing_elsewhere(machine: Callable, versions: dict[str, str], error: str | None) -> None:
    commands = machine(versions, error)
    assert doctor.repair() == ()
    assert commands == []


def test_a_removal_that_fails_says_which_command_to_run(machine: Callable) -> None:
    machine(VERSIONS, NMS, returncode=1)
    with pytest.raises(MissingError, match="read-only") as caught:
        doctor.repair()
    assert "pip uninstall --yes" in caught.value.fix


def test_a_check_that_raises_is_a_broken_row_and_not_a_crash() -> None:
    def burst() -> tuple[Row, ...]:
        raise ImportError("libfoo.so.1:\ncannot open shared object file")

    def missing() -> tuple[Row, ...]:
        raise MissingError("bubblewrap is not installed", "apt-get install bubblewrap")

    assert run_check("sandbox", burst) == (
        Row("sandbox", "broken", "ImportError: libfoo.so.1: cannot open shared object file", "run make setup again"),
    )
    assert run_check("sandbox", missing) == (
        Row("sandbox", "broken", "bubblewrap is not installed", "apt-get install bubblewrap"),
    )


def test_a_package_that_breaks_on_import_is_reported_from_a_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "badpackage.py").write_text("raise RuntimeError('operator bad::nms does not exist')")
    (tmp_path / "worsepackage.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    errors = packages.import_errors({"a": "import json", "b": "import badpackage", "c": "import worsepackage"})
    assert errors["a"] is None
    assert errors["b"] == "RuntimeError: operator bad::nms does not exist"
    assert errors["c"] is not None


def test_requirements_are_compared_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = [
        "typer>=0.1",
        "rich>=9999",
        "absent-package>=1",
        "pyyaml; python_version < '3'",
        'absent-extra>=1; extra == "deepspeed"',
        'ruff>=1; extra == "dev"',
    ]
    monkeypatch.setattr(packages.metadata, "requires", lambda _: requires)
    states = {state.name: state for state in packages.package_states()}
    assert set(states) == {"typer", "rich", "absent-package", "absent-extra"}
    assert states["typer"].fits
    assert not states["rich"].fits
    assert (states["absent-package"].installed, states["absent-extra"].extra) == (None, "deepspeed")


def test_wrong_and_absent_packages_are_broken_and_an_absent_extra_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    states = (
        packages.PackageState("typer", ">=0.1", "0.2", True, None),
        packages.PackageState("rich", ">=9", "8", False, None),
        packages.PackageState("numpy", ">=1", None, False, None),
        packages.PackageState("deepspeed", ">=0.19.8", None, False, "deepspeed"),
    )
    monkeypatch.setattr(doctor, "package_states", lambda: states)
    monkeypatch.setattr(doctor, "installed_version", {}.get)
    rows = {row.name: row for row in doctor.check_packages()}
    assert {name: row.status for name, row in rows.items()} == {
        "typer": "ok",
        "rich": "broken",
        "numpy": "broken",
        "deepspeed": "note",
    }
    assert rows["rich"].fix is not None
    assert "'rich>=9'" in rows["rich"].fix


@pytest.mark.parametrize(
    ("torch_cuda", "seen", "status", "word"),
    [("13.0", [["H", 1]], "ok", "native"), ("13.0", [], "broken", "driver"), (None, [], "note", "GPU=1")],
)
def test_a_gpu_that_torch_cannot_use_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, torch_cuda: str | None, seen: list, status: str, word: str
) -> None:
    hardware = Hardware(2, GIB, gpus=(Gpu(0, "H", 80 * GIB, (9, 0)),), torch_cuda=torch_cuda)
    monkeypatch.setattr(doctor, "detect", lambda: hardware)
    monkeypatch.setattr(doctor, "torch_facts", lambda: {"threads": 2, "gpus": seen})
    row = doctor.check_devices()[-1]
    assert row.status == status
    assert word in f"{row.detail} {row.fix}"


def test_models_are_counted_from_their_files_and_a_torn_one_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    weights = resolve("tiny-llama") / "model.safetensors"
    rows = {row.name: row for row in doctor.check_models()}
    assert (rows["tiny-llama"].status, rows["smollm2-135m"].status) == ("ok", "note")
    assert rows["smollm2-135m"].fix == "agentrl models prepare smollm2-135m"
    weights.write_bytes(weights.read_bytes()[:-8])
    torn = {row.name: row for row in doctor.check_models()}["tiny-llama"]
    assert torn.status == "broken"
    assert torn.fix is not None
    assert "prepare tiny-llama" in torn.fix


def test_a_broken_row_is_exit_code_3_with_its_fix_and_json_holds_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (Row("python", "ok", "3.11"), Row("ray exposure", "broken", "dashboard on 0.0.0.0", "ray stop"))
    monkeypatch.setattr(doctor, "examine", lambda: Report(rows))
    assert doctor_command.doctor() == 3
    assert "ray exposure: fix: ray stop" in capsys.readouterr().out
    assert doctor_command.doctor(json_output=True) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [check["name"] for check in told["checks"]] == ["python", "ray exposure"]
    monkeypatch.setattr(doctor, "examine", lambda: Report(rows[:1]))
    assert doctor_command.doctor() == 0


def test_every_broken_row_of_this_machine_has_a_fix_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from agentrl.preflight import doctor as d\n"
        "rows = [r for n in ('python', 'packages', 'disk', 'ray exposure', 'models') "
        "for r in d.run_check(n, d.CHECKS[n])]\n"
        "assert rows and all(r.fix for r in rows if r.status == 'broken'), rows\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'vllm', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
