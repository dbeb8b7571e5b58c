"""The scripted engine holds to every rule of a real one."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.protocols import WeightSource
from agentrl.rollout.engine import make_engine
from agentrl.rollout.faults import PromptTooLongError
from agentrl.rollout.gate import Gate
from agentrl.rollout.scripted import ScriptedEngine, prompt_text, resolve_script
from agentrl.types import Embeddings, Grammar, Key, Prompt, Request, Sampling


def request(prompt=(10, 11, 12), g=0, **sampling) -> Request:
    return Request("p", Prompt.of(list(prompt)), Sampling(**sampling), Key("train", 0, "t", g, 0, 0))


def answer(policy, reply, req, **options):
    async def main():
        engine = ScriptedEngine(lambda r, t: reply, {"p": policy}, gate=Gate(), **options)
        return await engine.generate(req)

    return asyncio.run(main())


def test_a_text_reply_ends_with_the_end_token_at_uniform_logprobs(scripted_policy):
    out = answer(scripted_policy, "hello", request())
    ids = scripted_policy.tokenizer.encode("hello").ids
    assert out.ids == (*ids, scripted_policy.eos_ids[0])
    assert out.finish_reason == "stop"
    assert out.logprobs == (-math.log(scripted_policy.vocab_size),) * len(out.ids)
    assert not any(out.constrained)


def test_ids_are_taken_as_they_are_and_a_given_logprob_is_used(scripted_policy):
    end = scripted_policy.eos_ids[0]
    out = answer(scripted_policy, (50, 51, end, 52), request(), logprob=-0.5)
    assert out.ids == (50, 51, end)
    assert out.logprobs == (-0.5,) * 3


def test_max_tokens_stops_and_the_window_cut_the_reply(scripted_policy):
    long = tuple(range(40, 60))
    assert answer(scripted_policy, long, request(max_tokens=4)).ids == long[:4]
    assert answer(scripted_policy, long, request(max_tokens=4)).finish_reason == "length"
    assert answer(scripted_policy, long, request(), max_model_len=8).ids == long[:5]
    assert answer(scripted_policy, long, request(stop_token_ids=(45,))).ids == long[:6]
    stopped = answer(scripted_policy, "<a>x</a> more", request(stop=("</a>",)))
    assert scripted_policy.tokenizer.decode(list(stopped.ids)).startswith("<a>x</a>")
    assert "more" not in scripted_policy.tokenizer.decode(list(stopped.ids))
    with pytest.raises(PromptTooLongError):
        answer(scripted_policy, long, request(), max_model_len=3)


def test_a_reply_must_follow_its_grammar(scripted_policy):
    grammar = Grammar("regex", "[ab]c")
    out = answer(scripted_policy, "bc", request(grammar=grammar))
    assert out.forced == (False, True, True)
    assert out.logprobs[0] == pytest.approx(-math.log(scripted_policy.grammar.matcher(grammar).num_allowed))
    assert out.logprobs[1:] == (0.0, 0.0)
    for wrong in ("cc", "b", "bcc"):
        with pytest.raises(EngineError, match="breaks its grammar"):
            answer(scripted_policy, wrong, request(grammar=grammar))


def test_the_script_sees_the_prompts_text_and_its_faults_reach_the_asker(scripted_policy):
    ids = scripted_policy.tokenizer.encode("<|im_start|>user hi").ids
    seen = []

    async def main():
        def reply(req, text):
            seen.append(text)
            if req.key.g:
                raise ValueError("no answer for this one")
            return "ok"

        engine = ScriptedEngine(reply, {"p": scripted_policy}, gate=Gate())
        await engine.generate(request(ids))
        with pytest.raises(ValueError, match="no answer"):
            await engine.generate(request(ids, g=1))
        await engine.generate(request(ids))

    asyncio.run(main())
    assert seen == ["<|im_start|>user hi"] * 3
    mixed = Prompt((tuple(ids[:1]), Embeddings(None, 4, 8), (50,)))
    assert prompt_text(scripted_policy.tokenizer, mixed).startswith("<|im_start|><embeddings:4>")


def test_the_version_is_the_one_last_loaded(scripted_policy):
    async def main():
        engine = ScriptedEngine(lambda r, t: "x", {"p": scripted_policy}, gate=Gate())
        assert await engine.load_weights("p", 4, WeightSource()) == 4
        assert (await engine.generate(request())).policy_version == 4
        with pytest.raises(EngineError, match="no policy"):
            await engine.load_weights("q", 5, WeightSource())
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request())

    asyncio.run(main())


def test_latency_runs_concurrently_outside_deterministic_mode(scripted_policy):
    async def main():
        engine = ScriptedEngine(lambda r, t: "x", {"p": scripted_policy}, gate=Gate(), latency_s=0.05)
        await asyncio.wait_for(asyncio.gather(*(engine.generate(request(g=g)) for g in range(50))), 2)
        assert len(engine.requests) == 50

    asyncio.run(main())


def shout(req: Request, text: str) -> str:
    return text.upper()


def test_a_script_is_named_module_function():
    assert resolve_script("string:capwords")("a b") == "A B"
    for name in ("nocolon", "string:", "no.such.module:f", "string:nothing", "string:ascii_letters"):
        with pytest.raises(ConfigError, match=r"engine\.script"):
            resolve_script(name)


def test_the_factory_makes_scripted_and_hf_engines(tiny_folder, monkeypatch):
    import string

    monkeypatch.setattr(string, "shout", shout, raising=False)

    async def main():
        folders = {"p": tiny_folder["llama"], "q": tiny_folder["llama"]}
        gate = Gate()
        scripted = make_engine(
            EngineConfig(kind="scripted", script="string:shout"), folders, dtype="float32", seed=0, gate=gate
        )
        await scripted.generate(request())
        hf = make_engine(EngineConfig(kind="hf", max_model_len=16), folders, dtype="float32", seed=0, gate=Gate())
        assert len((await hf.generate(request(max_tokens=99))).ids) <= 13
        own = {n: t * 1.1 for n, t in hf._policies["p"].model.named_parameters()}
        await hf.load_weights("p", 1, WeightSource(tensors=own))
        key = Key("eval", 0, "t", 0, 0, 0)
        first, second = [await hf.generate(Request(name, Prompt.of([5, 6]), Sampling(), key)) for name in "pq"]
        assert (first.policy_version, second.policy_version) == (1, 0)
        assert first.logprobs != second.logprobs
        await hf.close()
        with pytest.raises(ConfigError, match="script is not set"):
            make_engine(EngineConfig(kind="scripted"), folders, dtype="float32", seed=0, gate=gate)

    asyncio.run(main())


def test_an_hf_engine_computes_where_the_run_does_whatever_gpus_are_there(tiny_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folders = {"p": tiny_folder["llama"]}
    hf = make_engine(EngineConfig(kind="hf"), folders, dtype="float32", seed=0, gate=Gate(), device="cpu")
    assert str(hf._policies["p"].model.device) == "cpu"
    asyncio.run(hf.close())
