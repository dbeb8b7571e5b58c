"""The memory estimate: exact per parameter, shared parts once, refused before any weights, close to the measured."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from agentrl.config.schema import BaseRecipe, LoraConfig, ModelConfig
from agentrl.config.shipped import shipped_recipes
from agentrl.launch import devices
from agentrl.launch.devices import GIB, Gpu, Hardware, plan
from agentrl.launch.memory import Estimate, ModelSize, estimate
from agentrl.models import count_parameters, prepare
from agentrl.models.lora import num_parameters
from agentrl.preflight import memory as preflight_memory
from agentrl.preflight.check import check
from agentrl.preflight.memory import model_size
from agentrl.recipes.registry import load_recipe

N, A = 1_000_000, 1_000
SMOLLM = ModelSize("smollm2-135m", 134_515_008, 49_152, 576, 30, 1_536, 192)


def _size(place: str = "m", adapter: int = 0, begins: str | None = None) -> ModelSize:
    return ModelSize(
        place, N, vocab=100, hidden=8, layers=2, intermediate=16, kv_width=8, adapter=adapter, begins=begins
    )


def _estimate(policies: dict[str, dict[str, Any]], sizes: dict[str, ModelSize], **given: Any) -> Estimate:
    """Of a recipe with an agent per policy; `references`, `trains`, `ranks`, `gpu_bytes` and `gpus` go on to
    `estimate`, other keys are sections."""
    asked = {key: given.pop(key) for key in ("references", "trains", "ranks", "gpu_bytes", "gpus") if key in given}
    recipe = BaseRecipe.model_validate(
        {
            "method": "any",
            "policies": {name: {"name": "m", **model} for name, model in policies.items()},
            "agents": {name: {"policy": name} for name in policies},
            "engine": {"kind": "hf"},
            "run": {"steps": 1},
            **given,
        }
    )
    return estimate(recipe, sizes, **{"trains": True, "references": False, **asked})


def _bytes(found: Estimate, words: str) -> int:
    """Of the parts that `words` begin."""
    return sum(part.bytes for part in found.parts if part.what.startswith(words))


@pytest.mark.parametrize(("dtype", "each", "copy"), [("bfloat16", 18, 2), ("float32", 20, 4)])
def test_full_weights_hold_masters_gradients_moments_and_copies(dtype, each, copy):
    found = _estimate({"a": {"dtype": dtype}, "b": {"dtype": dtype}}, {"a": _size(), "b": _size()}, references=True)
    assert _bytes(found, "the weights of policy 'a'") == _bytes(found, "the weights of policy 'b'") == each * N
    assert _bytes(found, "the frozen reference of 'a', 'b'") == copy * N  # where they began is one model
    head = 0 if dtype == "float32" else 4 * 100 * 8
    assert _bytes(found, "the engine's copy") == 2 * (copy * N + head)
    assert not _bytes(_estimate({"a": {}}, {"a": _size()}), "the frozen reference")


def test_adapters_share_one_model_in_the_trainer_and_one_in_the_engine():
    lora = {"mode": "lora", "dtype": "bfloat16"}
    names = dict.fromkeys(("a", "b", "c"), lora) | {
        "partner": {"mode": "frozen"},
        "other": {"mode": "frozen", "name": "o"},
    }
    sizes = {n: _size(adapter=A) for n in "abc"} | {"partner": _size(), "other": _size("o")}
    found = _estimate(names, sizes, references=True)
    assert _bytes(found, "the adapter of policy 'a'") == 18 * A
    assert _bytes(found, "the trainer's model") == 2 * N
    assert not _bytes(found, "the frozen reference")  # the model with the adapters off
    head = 4 * 100 * 8
    assert _bytes(found, "the engine's copy of the weights of 'a', 'b', 'c' and 1 more") == 2 * (N + 3 * A) + head
    assert _bytes(found, "the engine's copy of the weights of 'other'") == 2 * N + head
    begun = {n: _size(adapter=A, begins="run") for n in "abc"} | {"partner": _size(), "other": _size("o")}
    assert _bytes(_estimate(names, begun, references=True), "the frozen reference") == 2 * A


def test_frozen_policies_cost_the_trainer_nothing_and_a_verb_without_training_costs_no_trainer():
    found = _estimate({"a": {"mode": "frozen"}}, {"a": _size()}, references=True)
    assert {part.what.split(" of ")[0] for part in found.parts} == {
        "the engine's copy",
        "the engine's cache",
        "the program and its libraries",
    }
    assert not _bytes(_estimate({"a": {}}, {"a": _size()}, trains=False), "the weights of policy")


def test_rollouts_and_updates_take_turns():
    found = _estimate({"a": {}}, {"a": _size()})
    sums = {phase: sum(p.bytes for p in found.parts if p.phase == phase) for phase in ("always", "rollout", "update")}
    assert found.bytes == sums["always"] + max(sums["rollout"], sums["update"])
    assert min(sums.values()) > 0


def test_rows_checkpointing_ranks_and_caches_change_the_estimate_as_they_change_the_run():
    sizes = {"a": _size()}
    rows = [_bytes(_estimate({"a": {}}, sizes, optim={"max_tokens_per_row": t}), "a training row") for t in (512, 1024)]
    assert rows[1] == 2 * rows[0]
    less = _estimate({"a": {}}, sizes, optim={"max_tokens_per_row": 1024, "gradient_checkpointing": True})
    assert _bytes(less, "a training row") < rows[1]
    assert _bytes(_estimate({"a": {}}, sizes, ranks=3), "the weights of policy 'a'") == (12 + 3 * 6) * N
    half = _estimate({"a": {}}, sizes, engine={"kind": "hf", "max_batch": 8})
    assert 8 * _bytes(half, "the engine's cache") == _bytes(_estimate({"a": {}}, sizes), "the engine's cache")
    vllm = _estimate({"a": {}, "b": {}}, {"a": _size(), "b": _size()}, engine={"kind": "vllm", "kv_cache_gib": 1.5})
    assert _bytes(vllm, "vLLM's cache") == 3 * GIB
    shared = {name: {"mode": "lora"} for name in "ab"}
    vllm = _estimate(shared, {"a": _size(), "b": _size()}, engine={"kind": "vllm", "kv_cache_gib": 1.5})
    assert _bytes(vllm, "vLLM's cache") == 1.5 * GIB


def test_on_a_gpu_vllm_takes_its_share_whole():
    found = _estimate({"a": {}}, {"a": _size()}, engine={"kind": "vllm"}, gpu_bytes=80 * GIB)
    assert _bytes(found, "vLLM's share of 0.85") == int(0.85 * 80 * GIB)
    found = _estimate(
        {"a": {}}, {"a": _size()}, engine={"kind": "vllm", "gpu_memory_utilization": 0.5}, gpu_bytes=80 * GIB
    )
    assert found.largest.fix == "lower engine.gpu_memory_utilization"
    assert 40 * GIB < found.bytes < 41 * GIB
    team, sizes = {name: {} for name in "abc"}, {name: _size() for name in "abc"}
    half = {"kind": "vllm", "gpu_memory_utilization": 0.3}
    for gpus, share in ((1, 0.9), (2, 0.6), (3, 0.3)):
        found = _estimate(team, sizes, engine=half, gpu_bytes=80 * GIB, gpus=gpus)
        assert found.largest.bytes == int(share * 80 * GIB), f"{gpus} GPUs"
    found = _estimate(team, sizes, engine={"kind": "vllm"}, gpu_bytes=80 * GIB)
    assert found.largest.bytes == int(0.85 * 80 * GIB), "the default is divided among the engines"


@pytest.fixture
def machine(monkeypatch):
    """`machine(gib, free, gpu)`: what `check` sees of the machine."""

    def see(gib: float, free: float | None = None, gpu: float | None = None) -> None:
        gpus = () if gpu is None else (Gpu(0, "GPU Z", int(gpu * GIB), (9, 0)),)
        seen = Hardware(2, int((free or gib) * GIB), True, gpus, "13.0" if gpus else None, int(gib * GIB))
        monkeypatch.setattr(devices, "detect", lambda: seen)

    return see


def _memory(loaded: Any, **options: Any) -> Any:
    [finding] = [f for f in check(loaded, needs_data=False, **options) if f.key == "memory"]
    return finding


def test_check_refuses_what_exceeds_the_machine_by_naming_both_the_largest_part_and_a_fix(machine, monkeypatch):
    monkeypatch.setattr(preflight_memory, "model_size", lambda model: SMOLLM)
    machine(4.0)
    found = _memory(load_recipe("mars-embedded"))
    assert (found.level, found.exit_code) == ("error", 3)
    assert found.message == (
        "about 4.5 GiB are needed, this machine has 4.0 GiB; the largest part is the weights of policy 'policy' in "
        "training, with gradients and moments (2.3 GiB)"
    )
    assert found.fix == "name a smaller model, or set mode: lora"
    assert _memory(load_recipe("mars-embedded"), trains=False).level == "info"
    machine(6.0, free=4.0)
    assert (_memory(load_recipe("mars-embedded")).level, _memory(load_recipe("mars-embedded")).exit_code) == (
        "warning",
        3,
    )
    machine(64.0, gpu=2.0)
    assert "the first GPU (GPU Z) has 2.0 GiB" in _memory(load_recipe("mars-embedded", ["launch.gpus=1"])).message


def test_what_hangs_on_how_long_texts_will_be_warns_and_refuses_nothing(machine, monkeypatch):
    monkeypatch.setattr(preflight_memory, "model_size", lambda model: SMOLLM)
    machine(12.0)
    long = [f"agents.{name}.max_prompt_tokens=24576" for name in ("system1", "system2")]
    found = _memory(load_recipe("mars-embedded", long))
    assert found.level == "warning"
    assert "where prompts are half as long as they may be, this machine has" in found.message
    assert found.fix == "lower engine.max_batch"
    machine(4.0)
    assert _memory(load_recipe("mars-embedded", long)).level == "error"


def test_a_refused_run_ends_before_its_folder_is_made(machine, monkeypatch, tmp_path, capsys):
    from agentrl.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    prepare("tiny-llama")
    machine(0.5)
    words = ["mars", "train", "mars-embedded", "--set", "model.name=tiny-llama", "--name", "run"]
    with pytest.raises(SystemExit) as left:
        app(words)
    assert left.value.code == 3
    assert "memory: about" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_the_models_files_nothing_is_claimed(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    machine(0.1)
    found = _memory(load_recipe("mars-embedded"))
    assert (found.level, found.message) == ("info", "no estimate: smollm2-135m is not here, or does not tell its sizes")


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_fits_a_cpu_machine_of_24_gib_in_its_smoke_form(monkeypatch, name):
    monkeypatch.setattr(preflight_memory, "model_size", lambda model: SMOLLM)
    seen, recipe = Hardware(2, 24 * GIB, total_bytes=24 * GIB), load_recipe(name, smoke=True).tree
    [(level, message, _)] = preflight_memory.memory_remarks(recipe, plan(recipe.launch, seen), seen, trains=True)
    assert level == "info"
    assert message.startswith("about ")


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_sizes_come_from_the_files_without_loading_them(monkeypatch, tmp_path, arch):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    folder = prepare(f"tiny-{arch}")
    size = model_size(ModelConfig(name=f"tiny-{arch}", mode="lora", lora=LoraConfig(rank=3)))
    assert size is not None
    assert (size.hidden, size.layers) == (64, 2)
    assert size.parameters == count_parameters(folder)
    assert size.adapter == num_parameters(folder, LoraConfig(rank=3))


def test_a_config_that_names_no_sizes_gives_no_estimate(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    config = prepare("tiny-llama") / "config.json"
    config.write_text('{"max_position_embeddings": 128}')
    assert model_size(ModelConfig(name="tiny-llama")) is None


_RUN = "import sys; from agentrl.cli import app; app(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("sets", [(), ("model.dtype=float32",), ("model.mode=lora",), ("algorithm.kl_coef=0.01",)])
def test_the_estimate_is_within_a_factor_of_two_of_the_measured_peak(tmp_path, sets):
    words = [part for text in (*sets, "launch.gpus=0", "rollout.questions_per_step=4") for part in ("--set", text)]
    loaded = load_recipe("mars-embedded", [*sets, "launch.gpus=0", "rollout.questions_per_step=4"], True)
    size = model_size(loaded.tree.policy_models["policy"])
    assert size is not None
    needed = estimate(loaded.tree, {"policy": size}, trains=True, references=loaded.tree.needs_reference).bytes
    child = subprocess.Popen(
        [sys.executable, "-c", _RUN, "mars", "train", "mars-embedded", "--smoke", *words],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0
    peak = usage.ru_maxrss * 1024
    assert peak / 2 < needed < 2 * peak, f"{peak / GIB:.2f} GiB measured, {needed / GIB:.2f} estimated"
