"""The hf engine: what it samples is a function of the request alone, and its records are true."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch

from agentrl.errors import ConfigError, EngineError
from agentrl.protocols import WeightSource
from agentrl.rollout.engine import load_hf_policy
from agentrl.rollout.faults import PromptTooLongError
from agentrl.rollout.gate import Gate
from agentrl.rollout.hf import HFEngine, uniforms
from agentrl.rollout.hf_generate import common_prefix
from agentrl.types import Embeddings, Grammar, Key, Prompt, Request, Sampling

PREFIX = [40 + i % 37 for i in range(24)]


def request(g: int, prompt: list[int], *, agent: int = 0, policy: str = "p", **sampling) -> Request:
    values = {"max_tokens": 8, **sampling}
    return Request(policy, Prompt.of(prompt), Sampling(**values), Key("train", 1, "t", g, 0, agent))


def varied(count: int, **sampling) -> list[Request]:
    rng = random.Random(3)
    return [
        request(g, PREFIX + [rng.randrange(3, 259) for _ in range(1 + g * 3 % 11)], **sampling) for g in range(count)
    ]


def run(policies, requests, **options):
    async def main():
        engine = HFEngine(policies, **{"seed": 5, "gate": Gate(), "deterministic": True, **options})
        try:
            return await asyncio.gather(*(engine.generate(r) for r in requests))
        finally:
            await engine.close()

    return asyncio.run(main())


def without_sharing(engine: HFEngine) -> None:
    engine._share_limits = dict.fromkeys(engine._share_limits, 0)


def plain_logprobs(policy, req: Request, ids) -> torch.Tensor:
    """log_softmax of one unbatched forward, with the model's stock attention."""
    full = torch.tensor([[*req.prompt.ids, *ids]])
    with torch.no_grad():
        logits = policy.model(full, use_cache=False).logits[0, len(req.prompt) - 1 : -1].float()
    return logits


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_behaviour_logprobs_equal_a_plain_forward(policy_of, arch):
    policy = policy_of(arch)
    requests = varied(9, temperature=0.7, top_k=50, top_p=0.9, max_tokens=12)
    for req, out in zip(requests, run({"p": policy}, requests), strict=True):
        logprobs = plain_logprobs(policy, req, out.ids).log_softmax(-1)
        expected = logprobs[torch.arange(len(out.ids)), torch.tensor(out.ids)]
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_shared_prefix_changes_nothing(policy_of, arch):
    policy = policy_of(arch)
    requests = varied(7, max_tokens=6)

    async def main(share):
        engine = HFEngine({"p": policy}, seed=5, gate=Gate(), deterministic=True)
        assert engine.shared_prefix_limits["p"] == (
            64 if arch == "gemma3" else policy.model.config.max_position_embeddings
        )
        if not share:
            without_sharing(engine)
        outs = await asyncio.gather(*(engine.generate(r) for r in requests))
        await engine.close()
        return outs

    shared, alone = asyncio.run(main(True)), asyncio.run(main(False))
    assert [o.ids for o in shared] == [o.ids for o in alone]
    for a, b in zip(shared, alone, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=1e-5)


def test_a_sliding_window_shorter_than_the_row_is_exact_too(policy_of):
    policy = policy_of("gemma3")  # window 64
    stem = [3 + i * 7 % 250 for i in range(80)]
    requests = [request(g, [*stem, *range(50 + g, 60 + 6 * g)], max_tokens=20) for g in range(4)]
    for req, out in zip(requests, run({"p": policy}, requests), strict=True):
        logprobs = plain_logprobs(policy, req, out.ids).log_softmax(-1)
        expected = logprobs[torch.arange(len(out.ids)), torch.tensor(out.ids)]
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)


def test_a_request_samples_the_same_alone_in_any_batch_and_in_any_order(policy):
    requests = varied(13, temperature=1.3, max_tokens=10)
    reference = [run({"p": policy}, [r])[0] for r in requests]
    shuffled = random.Random(0).sample(requests, len(requests))
    for max_batch, order in ((64, requests), (4, requests), (5, shuffled), (1, shuffled)):
        outs = dict(zip(order, run({"p": policy}, order, max_batch=max_batch), strict=True))
        for req, expected in zip(requests, reference, strict=True):
            assert outs[req].ids == expected.ids
            torch.testing.assert_close(
                torch.tensor(outs[req].logprobs), torch.tensor(expected.logprobs), atol=1e-5, rtol=1e-5
            )


def test_rows_keep_their_own_sampling_when_others_leave_the_batch(policy):
    kinds = [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1.5}, {"top_p": 0.2}, {"temperature": 0.3, "top_k": 9}]
    requests = [request(g, PREFIX[: 20 + g % 3], max_tokens=3 + 4 * (g % 4), **kinds[g % 5]) for g in range(20)]
    outs = run({"p": policy}, requests)
    assert [o.ids for o in outs] == [run({"p": policy}, [r])[0].ids for r in requests]


def test_the_same_flush_in_any_order_is_the_same_bit_for_bit(policy):
    requests = varied(9)
    shuffled = random.Random(1).sample(requests, len(requests))
    first = dict(zip(requests, run({"p": policy}, requests), strict=True))
    second = dict(zip(shuffled, run({"p": policy}, shuffled), strict=True))
    assert first == second


def test_keys_and_the_runs_seed_seed_the_draws(policy):
    same_prompt = [request(g, PREFIX, max_tokens=16) for g in range(6)]
    outs = run({"p": policy}, same_prompt)
    assert len({o.ids for o in outs}) == 6
    assert run({"p": policy}, same_prompt, seed=6) != outs
    assert run({"p": policy}, same_prompt) == outs
    assert uniforms(1, same_prompt[0].key, 3) != uniforms(1, same_prompt[1].key, 3)


def test_greedy_takes_the_largest_logit(policy):
    req = request(0, PREFIX, temperature=0.0, max_tokens=10)
    (out,) = run({"p": policy}, [req])
    assert list(out.ids) == plain_logprobs(policy, req, out.ids).argmax(-1).tolist()


def test_a_completion_ends_without_an_end_token_at_its_limit(policy):
    (out,) = run({"p": policy}, [request(0, PREFIX, max_tokens=5)])
    assert out.finish_reason == "length"
    assert len(out.ids) == 5
    assert out.ids[-1] not in policy.eos_ids
    assert out.constrained == out.forced == (False,) * 5


def test_a_stop_token_ends_the_completion_and_is_kept(policy):
    (free,) = run({"p": policy}, [request(0, PREFIX, max_tokens=12)])
    stop = free.ids[4]
    first = free.ids.index(stop)
    (out,) = run({"p": policy}, [request(0, PREFIX, max_tokens=12, stop_token_ids=(stop,))])
    assert out.ids == free.ids[: first + 1]
    assert out.finish_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_completion_and_is_kept(policy):
    grammar = Grammar("regex", "abcdef[0-9]{4}")
    (out,) = run({"p": policy}, [request(0, PREFIX, max_tokens=30, grammar=grammar, stop=("zz", "def"))])
    assert policy.tokenizer.decode(list(out.ids)) == "abcdef"
    assert out.finish_reason == "stop"


def test_the_end_token_ends_a_completion_though_no_stop_names_it(policy):
    grammar = Grammar("regex", "[ab]")
    (out,) = run({"p": policy}, [request(0, PREFIX, max_tokens=30, grammar=grammar)])
    assert len(out.ids) == 2
    assert out.ids[-1] == policy.eos_ids[0]
    assert out.finish_reason == "stop"


def test_a_grammar_marks_forced_and_constrained_tokens_and_renormalises(policy):
    grammar = Grammar("regex", "x[0-9]{2}y")
    requests = [request(g, PREFIX, grammar=grammar if g % 2 else None) for g in range(6)]
    for req, out in zip(requests, run({"p": policy}, requests), strict=True):
        if req.sampling.grammar is None:
            assert not any(out.constrained)
            continue
        replay = policy.grammar.replay(grammar, out.ids)
        assert out.forced == tuple(replay.forced_T.tolist())
        assert out.constrained == (True,) * len(out.ids)
        assert out.forced[-1]  # the end token
        assert all(lp == 0.0 for lp, forced in zip(out.logprobs, out.forced, strict=True) if forced)
        logits = plain_logprobs(policy, req, out.ids)
        matcher = policy.grammar.matcher(grammar)
        for t, token in enumerate(out.ids):
            masked = logits[t].masked_fill(~torch.from_numpy(matcher.allowed().copy()), -torch.inf)
            assert out.logprobs[t] == pytest.approx(float(masked.log_softmax(-1)[token]), abs=1e-4)
            matcher.advance(token)


def test_an_invalid_grammar_is_refused_before_it_runs(policy):
    with pytest.raises(ConfigError):
        run({"p": policy}, [request(0, PREFIX, grammar=Grammar("regex", "("))])


def test_the_window_cuts_max_tokens_and_a_prompt_without_room_is_a_value_error(policy):
    (out,) = run({"p": policy}, [request(0, PREFIX, max_tokens=50)], max_model_len=len(PREFIX) + 3)
    assert len(out.ids) == 3
    assert out.finish_reason == "length"
    with pytest.raises(PromptTooLongError):
        run({"p": policy}, [request(0, PREFIX)], max_model_len=len(PREFIX))
    assert not issubclass(PromptTooLongError, EngineError)


def test_embeddings_in_a_prompt_equal_the_ids_they_stand_for(policy):
    table = policy.model.get_input_embeddings()
    rows = []
    for g in range(3):
        ids = [*PREFIX[: 10 + g], 77, 78, 79]
        block = table(torch.tensor(ids[3:7])).detach()
        prompt = Prompt((tuple(ids[:3]), Embeddings(block, 4, block.shape[1]), tuple(ids[7:])))
        plain = request(g, ids)
        rows.append((plain, Request("p", prompt, plain.sampling, plain.key)))
    by_ids = run({"p": policy}, [plain for plain, _ in rows])
    by_embeddings = run({"p": policy}, [embedded for _, embedded in rows])
    assert [o.ids for o in by_ids] == [o.ids for o in by_embeddings]


def test_embeddings_of_another_width_end_the_run_with_their_shape(policy):
    prompt = Prompt(((3, 4), Embeddings(torch.zeros(2, 7), 2, 7)))
    with pytest.raises(EngineError, match="width"):
        run({"p": policy}, [Request("p", prompt, Sampling(), Key("train", 0, "t", 0, 0, 0))])


def test_nan_logits_name_the_policy_and_the_key(policy):
    async def main():
        engine = HFEngine({"p": policy}, seed=0, gate=Gate(), deterministic=True)
        with torch.no_grad():
            policy.model.model.norm.weight[0] = float("nan")
        try:
            await engine.generate(request(4, PREFIX))
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"'p' produced NaN logits at token 0 of Key\(.*g=4"):
        asyncio.run(main())


def test_new_weights_are_served_under_their_version_and_names_are_checked(policy, tmp_path):
    from safetensors.torch import save_file

    own = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    changed = {name: t + 0.05 * torch.randn(t.shape) for name, t in own.items()}
    req = request(0, PREFIX, temperature=0.0, max_tokens=4)

    async def main():
        engine = HFEngine({"p": policy}, seed=0, gate=Gate(), deterministic=True)
        before = await engine.generate(req)
        assert await engine.load_weights("p", 7, WeightSource(tensors=changed)) == 7
        after = await engine.generate(req)
        assert after.policy_version == 7
        assert after.logprobs != before.logprobs
        save_file(own, tmp_path / "model.safetensors")
        assert await engine.load_weights("p", 8, WeightSource(folder=tmp_path)) == 8
        again = await engine.generate(req)
        assert (again.ids, again.logprobs) == (before.ids, before.logprobs)
        norm = "model.norm.weight"
        for fault, tensors in {
            "is missing": {n: t for n, t in own.items() if n != norm},
            "unexpected weight 'extra'": own | {"extra": torch.zeros(1)},
            "has shape": own | {norm: torch.zeros(3)},
        }.items():
            with pytest.raises(EngineError, match=fault):
                await engine.load_weights("p", 9, WeightSource(tensors=tensors))
        assert (await engine.generate(req)).logprobs == before.logprobs
        await engine.close()

    asyncio.run(main())


def test_a_tied_head_follows_the_embeddings(policy):
    own = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    assert "lm_head.weight" not in own
    alias = own | {"lm_head.weight": own["model.embed_tokens.weight"]}
    moved = own | {"model.embed_tokens.weight": own["model.embed_tokens.weight"].roll(1, 0)}

    async def main():
        engine = HFEngine({"p": policy}, seed=0, gate=Gate(), deterministic=True)
        before = await engine.generate(request(0, PREFIX))
        await engine.load_weights("p", 1, WeightSource(tensors=alias))
        assert (await engine.generate(request(0, PREFIX))).logprobs == before.logprobs
        await engine.load_weights("p", 2, WeightSource(tensors=moved))
        assert (await engine.generate(request(0, PREFIX))).logprobs != before.logprobs
        await engine.close()

    asyncio.run(main())


def test_weights_wait_for_the_running_batch(policy, monkeypatch):
    import agentrl.rollout.hf as hf

    order = []
    original, copy = hf.generate_batch, hf.copy_weights

    def slow(*args, **kwargs):
        time.sleep(0.1)
        result = original(*args, **kwargs)
        order.append("batch")
        return result

    monkeypatch.setattr(hf, "generate_batch", slow)
    monkeypatch.setattr(hf, "copy_weights", lambda *args: (order.append("weights"), copy(*args)))
    own = {name: p.detach().clone() for name, p in policy.model.named_parameters()}

    async def main():
        engine = HFEngine({"p": policy}, seed=0, gate=Gate(), deterministic=True)
        task = asyncio.create_task(engine.generate(request(0, PREFIX)))
        await asyncio.sleep(0.03)
        await engine.load_weights("p", 3, WeightSource(tensors=own))
        assert (await task).policy_version == 0
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(0, PREFIX))

    asyncio.run(main())
    assert order == ["batch", "weights"]
    assert not [t for t in threading.enumerate() if t.name.startswith("hf-engine")]


def test_two_policies_keep_their_own_weights_and_an_unknown_one_is_named(policy_of):
    policies = {"p": policy_of("llama"), "q": policy_of("qwen3")}
    requests = [request(0, PREFIX, policy="p"), request(0, PREFIX, policy="q"), request(1, PREFIX, policy="q", agent=2)]
    outs = run(policies, requests)
    assert outs[1] == run({"q": policies["q"]}, [requests[1]])[0]
    with pytest.raises(EngineError, match="no policy 'r'"):
        run(policies, [request(0, PREFIX, policy="r")])


def test_the_common_prefix_leaves_a_token_of_each_prompt():
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix([[1, 2], [1, 2, 4]]) == 1
    assert common_prefix([[1, 2], [1, 2]]) == 1
    assert common_prefix([[1], [2]]) == 0


def test_the_head_never_multiplies_a_strided_view(policy, monkeypatch):
    # torch answers a strided (B, 1, D) input with one copy of the weight per row: 4 s at 64 rows of a 135M model.
    seen = []
    linear = torch.nn.functional.linear

    def watched(hidden, weight, bias=None):
        if weight.shape[0] == policy.vocab_size:
            seen.append(hidden.is_contiguous())
        return linear(hidden, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    run({"p": policy}, varied(5))
    assert seen
    assert all(seen)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_a_bf16_policy_has_its_logits_in_fp32_from_the_weights_it_holds_now(tiny_folder, arch):
    """Tied and untied heads, with and without a soft cap; a bf16 product would be off by 0.01 and more."""
    policy = load_hf_policy(tiny_folder[arch], "bfloat16")
    head = policy.model.get_output_embeddings()
    states = []
    policy.model.base_model.register_forward_hook(lambda *call: states.append(call[2].last_hidden_state[:, -1]))
    req = request(0, PREFIX, max_tokens=10, temperature=2.0)

    def gaps(out):
        hidden_TD = torch.cat(states[-len(out.ids) :])
        picked = torch.tensor(out.ids)[:, None]
        exact, rounded = hidden_TD.float() @ head.weight.float().T, (hidden_TD @ head.weight.T).float()
        told = torch.tensor(out.logprobs)
        return [float((x.log_softmax(-1).gather(1, picked)[:, 0] - told).abs().max()) for x in (exact, rounded)]

    async def main():
        engine = HFEngine({"p": policy}, seed=5, gate=Gate(), deterministic=True)
        for version in (1, 2):
            new = {n: p * (3 if version == 1 else -1) for n, p in policy.model.named_parameters()}
            await engine.load_weights("p", version, WeightSource(tensors=new))
            exact, rounded = gaps(await engine.generate(req))
            assert exact < 1e-4 < 3e-3 < rounded
        await engine.close()

    asyncio.run(main())
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
