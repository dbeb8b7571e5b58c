"""Adapters on one model: every policy's log-probabilities are those of its own merged model, on hf and on vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.schema import EngineConfig, LoraConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.models import load_model
from agentrl.models.lora import AdaptedModel, Adapter, num_parameters, share_models, write_config, write_weights
from agentrl.protocols import WeightSource
from agentrl.rollout.engine import make_engine
from agentrl.rollout.gate import Gate
from agentrl.rollout.vllm import VLLMEngine
from agentrl.rollout.vllm_fields import adapter_fields
from agentrl.rollout.weight_folder import adapter_folder
from agentrl.types import Completion, Key, Prompt, Request, Sampling

LORA = LoraConfig(rank=4, alpha=8)
PROMPT = tuple(range(40, 64))
ADAPTERS = {
    "a": Adapter(LORA),
    "b": Adapter(LoraConfig(rank=2, alpha=8, target_modules=("q_proj",))),
    "base": Adapter(),
}


def _adapter(folder: Path, lora: LoraConfig, seed: int) -> dict[str, torch.Tensor]:
    """An adapter that moves log-probabilities by far: both matrices are drawn."""
    model = AdaptedModel(load_model(folder, "float32"))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator) * (0.5 if "lora_B" in name else 0.2)
        for name, p in model.add("x", lora).items()
    }


def _merged(folder: Path, tensors: dict[str, torch.Tensor] | None, lora: LoraConfig | None, place: Path) -> Any:
    """By peft, from files, as any other program would."""
    import peft

    model = load_model(folder, "float32", attn_implementation="sdpa")
    if tensors is None or lora is None:
        return model
    place.mkdir()
    write_weights(place, tensors)
    write_config(place, lora, "", tensors)
    return peft.PeftModel.from_pretrained(model, str(place)).merge_and_unload().eval()


def _request(policy: str, g: int = 0, ids: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    return Request(policy, Prompt.of(ids), Sampling(**{"max_tokens": 12, **sampling}), Key("train", 0, "t", g, 0, 0))


def _gap(model: Any, prompt: tuple[int, ...], completion: Completion) -> float:
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1].float()
    wanted_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
    return float((wanted_T - torch.tensor(completion.logprobs)).abs().max())


async def _all(engine: Any, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(one) for one in requests))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_two_adapters_in_one_batch_are_each_their_merged_model(tiny_folder, tmp_path, arch):
    folder = tiny_folder[arch]
    tensors = {name: _adapter(folder, ADAPTERS[name].lora, seed) for seed, name in enumerate("ab")}
    models = {
        name: _merged(folder, tensors.get(name), adapter.lora, tmp_path / name) for name, adapter in ADAPTERS.items()
    }

    async def main() -> None:
        engine = make_engine(
            EngineConfig(kind="hf"),
            dict.fromkeys(ADAPTERS, folder),
            dtype="float32",
            seed=0,
            gate=Gate(),
            adapters=ADAPTERS,
        )
        requests = [_request(name, g) for g in range(3) for name in ADAPTERS]
        for done, request in zip(await _all(engine, requests), requests, strict=True):
            assert _gap(models["base"], PROMPT, done) < 1e-5, request.policy  # a new adapter is the model itself
        for version, name in enumerate("ab", start=1):
            assert await engine.load_weights(name, version, WeightSource(tensors=tensors[name])) == version
        done = dict(zip([(r.policy, r.key.g) for r in requests], await _all(engine, requests), strict=True))
        for (name, _), completion in done.items():
            gaps = {other: _gap(model, PROMPT, completion) for other, model in models.items()}
            assert gaps.pop(name) < 1e-5
            assert min(gaps.values()) > 1e-2
        assert {done[name, 0].policy_version for name in ADAPTERS} == {0, 1, 2}
        await engine.close()

    asyncio.run(main())


def test_one_model_is_in_memory_and_its_weights_cannot_be_loaded(tiny_folder, tmp_path):
    folder = tiny_folder["llama"]
    tensors = _adapter(folder, LORA, 0)

    async def main() -> None:
        engine = make_engine(
            EngineConfig(kind="hf"),
            dict.fromkeys((*ADAPTERS, "own"), folder),
            dtype="float32",
            seed=0,
            gate=Gate(),
            adapters=ADAPTERS,
        )
        models = {name: id(policy.model) for name, policy in engine._policies.items()}
        assert len({models[name] for name in ADAPTERS}) == 1
        assert models["own"] != models["a"]
        with pytest.raises(EngineError, match="a model that others share"):
            await engine.load_weights("base", 1, WeightSource(tensors=tensors))
        for fault, wrong in {
            "is missing": dict(list(tensors.items())[1:]),
            "unexpected weight": {**tensors, "extra": torch.zeros(1)},
            "unexpected weight 'model": {f"model.{n}": t for n, t in tensors.items()},
        }.items():
            with pytest.raises(EngineError, match=fault):
                await engine.load_weights("a", 1, WeightSource(tensors=wrong))
        with adapter_folder(WeightSource(tensors=tensors), LORA) as place:
            assert await engine.load_weights("a", 1, WeightSource(folder=place)) == 1
        assert not place.exists()
        await engine.close()

    asyncio.run(main())


def test_an_engine_begins_with_the_adapter_of_a_folder(tiny_folder, tmp_path):
    folder = tiny_folder["llama"]
    tensors = _adapter(folder, LORA, 3)
    model = _merged(folder, tensors, LORA, tmp_path / "start")

    async def main() -> None:
        adapters = {"p": Adapter(LORA, tmp_path / "start")}
        engine = make_engine(
            EngineConfig(kind="hf"), {"p": folder}, dtype="float32", seed=0, gate=Gate(), adapters=adapters
        )
        assert _gap(model, PROMPT, await engine.generate(_request("p"))) < 1e-5
        await engine.close()

    asyncio.run(main())


def test_vllm_sets_room_aside_for_the_adapters_and_leaves_the_head_alone(tiny_folder):
    fields = adapter_fields(tiny_folder["llama"], [LORA, LoraConfig(rank=9, target_modules=("q_proj",))])
    assert (fields["max_loras"], fields["max_cpu_loras"], fields["max_lora_rank"]) == (2, 3, 16)
    assert "q_proj" in fields["lora_target_modules"]
    assert not {"lm_head", "embed_tokens"} & set(fields["lora_target_modules"])
    assert adapter_fields(tiny_folder["llama"], [None, LORA])["max_loras"] == 2  # the bare model has a slot too
    with pytest.raises(ConfigError, match="lm_head"):
        adapter_fields(tiny_folder["llama"], [LoraConfig(target_modules=("lm_head",))])


def test_policies_share_an_engine_only_as_adapters_of_one_folder():
    a, b = Path("a"), Path("b")
    policies = {"one": a, "full": a, "two": a, "three": b, "bare": b}
    adapters = {name: Adapter(LORA) for name in ("one", "two", "three")} | {"bare": Adapter()}
    assert share_models(policies, adapters) == (("one", "two"), ("full",), ("three", "bare"))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_the_size_of_an_adapter_is_told_from_the_files_alone(tiny_folder, arch):
    for lora in (LORA, LoraConfig(rank=3, target_modules=("c_attn" if arch == "gpt2" else "up_proj",))):
        made = AdaptedModel(load_model(tiny_folder[arch], "float32")).add("x", lora)
        assert num_parameters(tiny_folder[arch], lora) == sum(p.numel() for p in made.values())


# --- slow: one vLLM engine for three policies --------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_vllm_engine_serves_each_policy_its_own_adapter_and_version(run, tiny_folder, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tiny_folder["llama"]
    first = {name: _adapter(folder, ADAPTERS[name].lora, seed) for seed, name in enumerate("ab")}
    second = _adapter(folder, LORA, 9)
    models = {
        "base": _merged(folder, None, None, tmp_path),
        "a": _merged(folder, first["a"], LORA, tmp_path / "a"),
        "b": _merged(folder, first["b"], ADAPTERS["b"].lora, tmp_path / "b"),
        "a2": _merged(folder, second, LORA, tmp_path / "a2"),
    }
    config = EngineConfig(kind="vllm", dtype="float32", max_model_len=128, kv_cache_gib=0.25)
    adapters = {**ADAPTERS, "b": Adapter(ADAPTERS["b"].lora, tmp_path / "b")}
    engine = run(VLLMEngine.start(config, dict.fromkeys(adapters, folder), dtype="bfloat16", seed=3, adapters=adapters))
    with contextlib.closing(_Closing(run, engine)):
        assert len({id(actor) for actor in engine.actors.values()}) == 1
        requests = [_request(name, g) for g in range(3) for name in adapters]

        def served(**wanted: str) -> list[Completion]:
            done = run(_all(engine, requests))
            for completion, request in zip(done, requests, strict=True):
                own = wanted[request.policy]
                gaps = {name: _gap(model, PROMPT, completion) for name, model in models.items()}
                assert gaps.pop(own) < 1e-3, (request.policy, own)
                assert min(gaps.values()) > 1e-2
            return done

        served(a="base", b="b", base="base")
        assert run(engine.load_weights("a", 1, WeightSource(tensors=first["a"]))) == 1
        done = served(a="a", b="b", base="base")
        assert {c.policy_version for c, r in zip(done, requests, strict=True) if r.policy == "a"} == {1}
        # the same prompts again: a cached prefix of the version before would show
        assert run(engine.load_weights("a", 2, WeightSource(tensors=second))) == 2
        served(a="a2", b="b", base="base")
        for version in range(3, 8):  # more than there are slots
            tensors = (first["a"], second)[version % 2]
            assert run(engine.load_weights("a", version, WeightSource(tensors=tensors))) == version
        served(a="a2", b="b", base="base")
        with pytest.raises(EngineError, match="a model that others share"):
            run(engine.load_weights("base", 1, WeightSource(tensors=second)))
        with pytest.raises(EngineError, match="did not take version 9: 2 weights are on one side only"):
            run(engine.load_weights("a", 9, WeightSource(tensors=second | _of_no_layer(second))))


def _of_no_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a layer that the model has not: vLLM leaves it out without a word."""
    return {n.replace("layers.0", "layers.77"): t.clone() for n, t in tensors.items() if "layers.0.self_attn.q_" in n}


class _Closing:
    def __init__(self, run: Any, engine: VLLMEngine) -> None:
        self._run, self._engine = run, engine

    def close(self) -> None:
        self._run(self._engine.close())
