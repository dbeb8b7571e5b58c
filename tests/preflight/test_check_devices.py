"""What `check` says of a recipe's GPUs, and what the recipe's own head says of them."""

from __future__ import annotations

import re

import pytest

from agentrl.config.shipped import shipped_recipes
from agentrl.launch.devices import GIB, Gpu, Hardware
from agentrl.launch.memory import ModelSize
from agentrl.preflight import memory
from agentrl.preflight.check import check
from agentrl.recipes.registry import load_recipe

SIZES = {
    "Qwen/Qwen3-8B": ModelSize("8b", 8_190_735_360, 151_936, 4096, 36, 12_288, 1024, adapter=43_646_976),
    "Qwen/Qwen3-4B": ModelSize("4b", 4_022_468_096, 151_936, 2560, 36, 9728, 1024, adapter=33_030_144),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ModelSize(
        "1.5b", 1_777_088_000, 151_936, 1536, 28, 8960, 256, adapter=18_464_768
    ),
}


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(i, "NVIDIA X", 80 * GIB, (9, 0)) for i in range(8))
    seen = Hardware(16, 128 * GIB, True, gpus, "13.0", 128 * GIB)
    monkeypatch.setattr("agentrl.launch.devices.detect", lambda: seen)


def found(name: str, *sets: str, key: str = "launch.gpus", trains: bool = True) -> list[tuple[str, str, str]]:
    findings = check(load_recipe(name, sets), needs_data=False, trains=trains)
    return [(f.level, f.message, f.fix) for f in findings if f.key == key]


def test_more_gpus_than_trainer_ranks_are_refused() -> None:
    assert found("hle", "launch.ranks=1") == [
        (
            "error",
            "8 GPUs are here, but the one trainer rank uses one of them",
            "set launch.ranks: 8 to train on all, or launch.gpus: 1",
        )
    ]
    assert not found("hle", "launch.gpus=1", "launch.ranks=1")


def test_a_gpu_for_each_trainer_rank_is_no_fault_and_more_are() -> None:
    assert not found("hle", "launch.gpus=2", "launch.ranks=2")
    assert not found("hle", "launch.gpus=2", "launch.ranks=2", key="launch.ranks")
    assert found("hle", "launch.gpus=4", "launch.ranks=2") == [
        (
            "error",
            "4 GPUs are here, but the 2 trainer ranks use 2 of them",
            "set launch.ranks: 4 to train on all, or launch.gpus: 2",
        )
    ]


def test_where_the_driver_alone_trains_no_rank_is_advised() -> None:
    [(_, message, fix)] = found("sequential-light", "launch.gpus=4")
    assert (message, fix) == ("4 GPUs are here, but the one trainer rank uses one of them", "set launch.gpus: 1")


def see(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int) -> None:
    there = tuple(Gpu(i, "NVIDIA X", 80 * GIB, (9, 0)) for i in range(gpus))
    seen = Hardware(cores, 128 * GIB, True, there, "13.0" if there else None, 128 * GIB)
    monkeypatch.setattr("agentrl.launch.devices.detect", lambda: seen)


@pytest.mark.parametrize("name", ["hle", "mathchat", "mathchat-1.5b", "dsbench"])
@pytest.mark.parametrize(("cores", "gpus"), [(16, 1), (1, 0)])
def test_the_trainer_ranks_of_a_recipe_do_not_stop_verbs_that_do_not_train(
    name: str, cores: int, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, cores, gpus)
    monkeypatch.setattr(memory, "model_size", lambda model: SIZES[model.name])
    for key in ("launch.gpus", "launch.ranks", "launch.threads"):
        assert not found(name, f"launch.gpus={gpus}", key=key, trains=False)
    assert found(name, f"launch.gpus={gpus}", key="memory", trains=False)
    assert [level for level, _, _ in found(name, f"launch.gpus={gpus}", key="launch.ranks")] == ["error"]
    assert "and launch.ranks: 1" in found(name)[0][2]


def test_gpus_that_an_engine_without_training_leaves_idle_are_told() -> None:
    hf = "engine.kind=hf"
    assert found("hle", hf, trains=False) == [
        ("warning", "8 GPUs are here, but the hf engine computes on one of them", "set launch.gpus: 1")
    ]
    assert not found("hle", hf, "launch.gpus=1", trains=False)
    assert not found("hle", trains=False), "vllm spreads its engines over them"
    assert [level for level, _, _ in found("sequential-light", "launch.gpus=4", trains=False)] == ["error"]


def head(name: str) -> str:
    """The paragraph of a recipe's head that tells its hardware, in one line."""
    text = shipped_recipes()[name].read_text("utf-8")
    lines = re.search(r"^# Hardware +(.*\n(?:# {12}.*\n)*)", text, re.MULTILINE)
    assert lines is not None
    return " ".join(lines[1].replace("\n#", " ").split())


@pytest.mark.parametrize("name", ["hle", "mathchat", "mathchat-1.5b", "dsbench"])
def test_a_recipes_head_tells_its_gpus_its_ranks_and_what_check_says_of_both(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "model_size", lambda model: SIZES[model.name])
    launch, said = load_recipe(name).tree.launch, head(name)
    assert said.startswith(f"{launch.gpus} GPUs, a trainer rank on each.")
    assert launch.ranks == launch.gpus
    assert not found(name)
    assert not found(name, key="launch.ranks")

    assert "`check` refuses GPUs of 80 GB" in said
    [(level, _, _)] = found(name, key="memory")
    assert level == "error"
    policies = list(load_recipe(name).tree.policy_models)
    there = re.findall(r"--set (\S+)", said)
    sets = [s.replace("NAME", policy) for s in there for policy in (policies if "NAME" in s else policies[:1])]
    [(level, message, _)] = found(name, *sets, key="memory")
    assert level == "info", message
    told = re.search(r"about (\d+) GiB on the first", said)
    assert told is not None
    assert abs(float(message.split()[1]) - int(told[1])) < 1
