"""Grammars: the allowed sets, their replay, and their agreement with vLLM's backend."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.errors import ConfigError
from agentrl.grammar import GrammarFactory, GrammarViolationError, unpack
from agentrl.types import Grammar

V = 300  # the model has more rows than the tokenizer tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<end2>"])
    return tokenizer


@pytest.fixture(scope="module")
def factory(tokenizer) -> GrammarFactory:
    return GrammarFactory(tokenizer, V, (257,))


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def allowed(matcher) -> list[int]:
    return np.nonzero(matcher.allowed())[0].tolist()


def test_the_allowed_set_follows_the_sampled_tokens(factory, tokenizer):
    a, b = tokenizer.encode("ab").ids
    matcher = factory.matcher(regex("ab?"))
    assert allowed(matcher) == [a]
    assert matcher.forced
    matcher.advance(a)
    assert allowed(matcher) == [b, 257]
    assert not matcher.forced
    matcher.advance(b)
    assert allowed(matcher) == [257]
    assert matcher.forced


def test_a_complete_grammar_allows_every_end_token_and_only_those(tokenizer):
    matcher = GrammarFactory(tokenizer, V, (257, 258)).matcher(regex("a"))
    matcher.advance(tokenizer.token_to_id("a"))
    assert allowed(matcher) == [257, 258]
    assert not matcher.forced
    matcher.advance(258)


def test_rows_beyond_the_tokenizer_and_special_tokens_are_never_allowed(factory, tokenizer):
    matcher = factory.matcher(regex("(.|\n)*"))
    sets = matcher.allowed()
    assert sets.shape == (V,)
    assert not sets[tokenizer.get_vocab_size() :].any()
    assert not sets[256]
    assert matcher.constrained


def test_a_token_outside_the_grammar_is_named_with_its_place(factory, tokenizer):
    matcher = factory.matcher(regex("ab"))
    matcher.advance(tokenizer.token_to_id("a"))
    with pytest.raises(GrammarViolationError, match="position 1") as caught:
        matcher.advance(tokenizer.token_to_id("a"))
    assert caught.value.position == 1
    for token in (-1, V, V + 1000):
        with pytest.raises(GrammarViolationError):
            factory.matcher(regex("ab")).advance(token)


@pytest.mark.parametrize(
    "grammar", [regex("("), regex("a(?=b)"), Grammar("json_schema", "{"), Grammar("json_schema", '{"type": "objec"}')]
)
def test_an_invalid_grammar_is_a_config_error_of_one_line(factory, grammar):
    with pytest.raises(ConfigError, match=f"invalid {grammar.kind} grammar") as caught:
        factory.matcher(grammar)
    assert "\n" not in caught.value.cause


def test_replay_rebuilds_the_sets_the_sampler_saw(factory, tokenizer):
    grammar = regex("[0-9]{1,3} apples")
    ids = [*tokenizer.encode("42 apples").ids, 257]
    replay = factory.replay(grammar, ids)
    assert replay.bitmask_TW.shape == (len(ids), (V + 31) // 32)
    assert replay.bitmask_TW.dtype == np.int32
    matcher = factory.matcher(grammar)
    for t, token in enumerate(ids):
        np.testing.assert_array_equal(unpack(replay.bitmask_TW[t], V), matcher.allowed())
        assert replay.forced_T[t] == matcher.forced
        matcher.advance(token)
    assert replay.forced_T.tolist() == [False, False, False, *[True] * 7]
    assert replay.constrained_T.all()
    with pytest.raises(GrammarViolationError):
        factory.replay(grammar, tokenizer.encode("4x").ids)
    assert factory.replay(grammar, []).bitmask_TW.shape == (0, factory.num_words)


def test_walks_from_one_compiled_grammar_are_independent(factory, tokenizer):
    first, second = factory.matcher(regex("ab")), factory.matcher(regex("ab"))
    first.advance(tokenizer.token_to_id("a"))
    assert allowed(second) == [tokenizer.token_to_id("a")]


def test_fill_writes_each_matcher_into_its_row(factory):
    matchers = [factory.matcher(regex(text)) for text in ("a", "[b-d]")]
    bitmask_BW = np.zeros((3, factory.num_words), dtype=np.int32)
    factory.fill([(matchers[0], 2), (matchers[1], 0)], bitmask_BW)
    np.testing.assert_array_equal(bitmask_BW[2], matchers[0].bitmask())
    np.testing.assert_array_equal(bitmask_BW[0], matchers[1].bitmask())
    assert not bitmask_BW[1].any()


def test_a_json_schema_allows_its_instances_and_nothing_else(factory, tokenizer):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = Grammar("json_schema", json.dumps(schema | {"additionalProperties": False}))
    factory.replay(grammar, [*tokenizer.encode('{"n": 12}').ids, 257])
    factory.replay(grammar, [*tokenizer.encode('{ "n" :12 }').ids, 257])  # flexible whitespace, as in vLLM
    with pytest.raises(GrammarViolationError):
        factory.replay(grammar, tokenizer.encode('{"m": 12}').ids)


def test_the_sets_equal_those_of_vllms_guidance_backend(tokenizer, factory):
    # vLLM is optional, so this follows its backend_guidance.py call by call.
    import llguidance
    import llguidance.hf
    import llguidance.numpy
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    ll_tokenizer = llguidance.hf.from_tokenizer(wrapped, max(V, len(wrapped)))
    schema = '{"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}'
    for grammar, text in ((regex("<a>[a-z]+</a>"), "<a>xyz</a>"), (Grammar("json_schema", schema), '{"q": "a b"}')):
        if grammar.kind == "regex":
            spec = llguidance.grammar_from("regex", grammar.text)
        else:
            spec = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
        matcher = llguidance.LLMatcher(ll_tokenizer, spec)
        ids = [*tokenizer.encode(text).ids, 257]
        replay = factory.replay(grammar, ids)
        for t, token in enumerate(ids):
            theirs = llguidance.numpy.allocate_token_bitmask(1, ll_tokenizer.vocab_size)
            llguidance.numpy.fill_next_token_bitmask(matcher, theirs, 0)
            np.testing.assert_array_equal(replay.bitmask_TW[t], theirs[0])
            matcher.consume_token(token)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="vocab size too small"):
        GrammarFactory(tokenizer, 100, (5,))
