"""Plans: GPUs first, the CPU where there are none, and one line where there are too few."""

from __future__ import annotations

import re

import pytest

from agentrl.config.schema import LaunchConfig
from agentrl.errors import ConfigError, MissingError
from agentrl.launch.devices import GIB, Gpu, Hardware, detect, plan, visible_gpus

CPU = Hardware(cores=2, memory_bytes=8 * GIB, cpu_bf16=True)
GPUS = tuple(Gpu(i, "H", 80 * GIB, (9, 0)) for i in range(4))
BOX = Hardware(cores=16, memory_bytes=64 * GIB, gpus=GPUS, torch_cuda="13.0")


def test_gpus_come_first_and_all_of_them_by_default() -> None:
    made = plan(LaunchConfig(), BOX)
    assert (made.device, made.gpus, made.threads) == ("cuda", (0, 1, 2, 3), 16)
    assert made.available_bytes == 320 * GIB
    assert plan(LaunchConfig(gpus=2), BOX).gpus == (0, 1)


def test_zero_gpus_is_the_cpu_even_where_gpus_are() -> None:
    made = plan(LaunchConfig(gpus=0, threads=3), BOX)
    assert (made.device, made.gpus, made.threads, made.available_bytes) == ("cpu", (), 3, 64 * GIB)


def test_without_gpus_the_default_is_the_cpu() -> None:
    made = plan(LaunchConfig(), CPU)
    assert (made.device, made.gpus, made.threads, made.native_bf16) == ("cpu", (), 2, True)


@pytest.mark.parametrize(
    ("wanted", "hardware", "cause", "fix"),
    [
        (1, CPU, "launch.gpus is 1, but this process sees no GPU", "launch.gpus: 0"),
        (8, BOX, "launch.gpus is 8, but this process sees 4 GPUs", "launch.gpus: 4"),
        (2, Hardware(2, GIB, gpus=GPUS), "CPU build", "make setup GPU=1"),
    ],
)
def test_absent_gpus_are_one_line_with_a_fix(wanted: int, hardware: Hardware, cause: str, fix: str) -> None:
    with pytest.raises(MissingError) as caught:
        plan(LaunchConfig(gpus=wanted), hardware)
    assert cause in caught.value.cause
    assert fix in caught.value.fix
    assert caught.value.exit_code == 3


def test_gpus_that_a_cpu_build_of_torch_cannot_use_are_not_planned_by_default() -> None:
    assert plan(LaunchConfig(), Hardware(2, GIB, gpus=GPUS)).device == "cpu"


def test_bf16_is_native_only_if_every_planned_gpu_has_it() -> None:
    mixed = Hardware(2, GIB, gpus=(GPUS[0], Gpu(1, "T4", 16 * GIB, (7, 5))), torch_cuda="13.0")
    assert plan(LaunchConfig(gpus=1), mixed).native_bf16
    assert not plan(LaunchConfig(), mixed).native_bf16


LISTING = "0, GPU-aaa, NVIDIA X, 81559, 9.0\n1, GPU-bbb, NVIDIA Y, 16384, 7.5\n"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA X", "NVIDIA Y"]),
        ("1,0", ["NVIDIA Y", "NVIDIA X"]),
        ("GPU-b", ["NVIDIA Y"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["NVIDIA X"]),
    ],
)
def test_cuda_visible_devices_hides_and_reorders(visible: str | None, names: list[str]) -> None:
    gpus = visible_gpus(LISTING, visible)
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.index for gpu in gpus] == list(range(len(names)))


def test_a_listing_is_read_whole_and_rubbish_is_no_gpu() -> None:
    assert visible_gpus(LISTING, None)[1] == Gpu(1, "NVIDIA Y", 16 * GIB, (7, 5))
    assert visible_gpus("Failed to initialize NVML: Driver mismatch\n", None) == ()


def test_ranks_share_the_cores_and_need_a_gpu_each() -> None:
    four = Hardware(4, GIB)
    shared = plan(LaunchConfig(ranks=2), four)
    assert (shared.ranks, shared.threads, shared.rank_threads) == (2, 4, 2)
    assert plan(LaunchConfig(ranks=2, threads=3), four).rank_threads == 3
    assert plan(LaunchConfig(ranks=5), four).rank_threads == 1
    with pytest.raises(ConfigError, match=r"launch.ranks is 4: 20 threads are more than 16"):
        plan(LaunchConfig(ranks=4, threads=5), Hardware(4, GIB))
    gpu = Hardware(64, GIB, gpus=(Gpu(0, "X", GIB, (9, 0)), Gpu(1, "X", GIB, (9, 0))), torch_cuda="13.0")
    assert plan(LaunchConfig(ranks=2), gpu).ranks == 2
    with pytest.raises(ConfigError, match=r"launch.ranks is 3, but the run has 2 GPUs"):
        plan(LaunchConfig(ranks=3), gpu)


ONE = Hardware(16, GIB, gpus=GPUS[:1], torch_cuda="13.0")
SMALL = Hardware(1, GIB)


@pytest.mark.parametrize(
    ("launch", "hardware", "fix"),
    [
        (LaunchConfig(gpus=8, ranks=8), ONE, "set launch.gpus: 1 and launch.ranks: 1, or run where 8 are visible"),
        (LaunchConfig(gpus=8, ranks=8), BOX, "set launch.gpus: 4 and launch.ranks: 4, or"),
        (LaunchConfig(gpus=8, ranks=8), SMALL, "set launch.gpus: 0 and launch.ranks: 1 to run on the CPU, or"),
        (LaunchConfig(gpus=8, ranks=8), Hardware(8, GIB), "set launch.gpus: 0 to run on the CPU, or"),
        (LaunchConfig(gpus=4, ranks=4), Hardware(2, GIB, gpus=GPUS), "launch.gpus: 0 and launch.ranks: 2 to run on"),
        (LaunchConfig(gpus=0, ranks=8), SMALL, "set launch.ranks to at most 1"),
        (LaunchConfig(gpus=0, ranks=4, threads=5), Hardware(4, GIB), "set launch.ranks to at most 3"),
    ],
)
def test_a_fix_names_the_ranks_too_where_they_do_not_fit_and_following_it_is_enough(
    launch: LaunchConfig, hardware: Hardware, fix: str
) -> None:
    with pytest.raises((ConfigError, MissingError)) as caught:
        plan(launch, hardware)
    assert fix in caught.value.fix
    said = dict(re.findall(r"launch\.(gpus|ranks)(?::| to at most) (\d+)", caught.value.fix))
    plan(launch.model_copy(update={key: int(value) for key, value in said.items()}), hardware)


def test_a_verb_that_does_not_train_needs_no_room_for_ranks() -> None:
    made = plan(LaunchConfig(gpus=1, ranks=8), ONE, trains=False)
    assert (made.device, made.gpus, made.ranks, made.rank_threads) == ("cuda", (0,), 1, 16)
    assert plan(LaunchConfig(gpus=0, ranks=8), SMALL, trains=False).device == "cpu"
    with pytest.raises(MissingError) as caught:
        plan(LaunchConfig(gpus=8, ranks=8), ONE, trains=False)
    assert "set launch.gpus: 1, or" in caught.value.fix


def test_this_machine_can_be_looked_at() -> None:
    hardware = detect()
    assert hardware.cores >= 1
    assert hardware.memory_bytes > GIB // 4
    assert hardware.total_bytes >= hardware.memory_bytes
