from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.chat.tool_calls import ToolCall, call_grammar, check_tag_tools, parse, usage, without_thinking
from agentrl.errors import ConfigError

QUERY = {
    "type": "object",
    "properties": {"query": {"type": "array", "items": {"type": "string"}}, "top": {"type": "integer"}},
    "required": ["query"],
}
CODE = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "fast": {"type": "boolean"}, "wait": {"type": "number"}},
    "required": ["code"],
    "additionalProperties": False,
}
TOOLS = {"search": QUERY, "python": CODE}


def call(name: object = "search", arguments: object = None, purpose: object = "why", **more: object) -> str:
    body = {"name": name, "arguments": {"query": ["a"]} if arguments is None else arguments, "purpose": purpose, **more}
    return f"<tool_call>{json.dumps(body)}</tool_call>"


GOOD = ToolCall("search", {"query": ["a"]}, "why", 0)


def hermes(text: str, **switches: bool):
    return parse(text, "hermes", TOOLS, **switches)


def tag(text: str, **switches: bool):
    return parse(text, "tag", TOOLS, **switches)


def test_a_call_and_an_answer_are_read_in_both_syntaxes() -> None:
    text = "<think>hm</think>I look it up.\n"
    assert hermes(text + call()).calls == (GOOD,)
    assert tag(text + "<search>a | why</search>").calls == (GOOD,)
    for parser in (hermes, tag):
        found = parser("<think>x</think> <answer>\n Paris\n</answer>")
        assert (found.answer, found.calls, found.errors) == ("Paris", (), ())
        assert parser("just words") == parser("")


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("a<think>b</think>c", "ac"),
        ("a<think>b", "a"),
        ("b</think>c", "c"),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("a</think>b</think>c", "c"),
        ("x<think>a</think>b</think>c", "c"),
        ("<think>a<think>b</think>c", "c"),
        ("<think></think>", ""),
        ("<tool_call>hm</think>x", "x"),
        ("plain", "plain"),
    ],
)
def test_thinking_is_cut_out_whichever_of_its_tags_are_there(text: str, visible: str) -> None:
    assert without_thinking(text) == visible


def test_calls_and_answers_inside_thinking_are_ignored() -> None:
    thoughts = call() + "<search>a | why</search><answer>wrong</answer>"
    for parser, good in ((hermes, call()), (tag, "<search>a | why</search>")):
        for text in (f"<think>{thoughts}</think>{good}", f"{thoughts}</think>{good}", f"{good}<think>{thoughts}"):
            found = parser(text)
            assert found.calls == (GOOD,), text
            assert found.answer is None
            assert found.errors == ()


def test_tags_inside_a_calls_json_are_part_of_its_arguments() -> None:
    code = "print('</think><think><answer>no</answer></tool_call><tool_call>')"
    found = hermes(f"<think>x</think>{call('python', {'code': code})}<answer>yes</answer>")
    assert found.calls == (ToolCall("python", {"code": code}, "why", 0),)
    assert found.answer == "yes"
    assert found.errors == ()


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('<tool_call>{"name": "search", "arguments": {"query": ["a"</tool_call>', "malformed", "not valid JSON"),
        ('<tool_call>{"name": "search", "purpose": "x",}</tool_call>', "malformed", "not valid JSON"),
        ("<tool_call>search a</tool_call>", "malformed", "not valid JSON"),
        ('<tool_call>{"name": NaN}</tool_call>', "malformed", "NaN"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "malformed", "nested"),
        ('<tool_call>{"name": ' + "9" * 5000 + "}</tool_call>", "malformed", "digit"),
        ("<tool_call>[1]</tool_call>", "malformed", "one JSON object"),
        (call().replace("</tool", "} and</tool"), "malformed", "after its JSON"),
        (call(name=3), "malformed", '"name"'),
        (call(name="browse"), "unknown_tool", "no tool 'browse', only search, python"),
        (call(arguments="a"), "arguments", '"arguments" must be a JSON object'),
        (call(arguments={}), "arguments", "lacks 'query'"),
        (call(arguments={"query": "a"}), "arguments", "query must be array of string, not string"),
        (call(arguments={"query": ["a", 1]}), "arguments", r"query\[1\] must be string, not integer"),
        (call(arguments={"query": ["a"], "top": True}), "arguments", "top must be integer, not boolean"),
        (call(arguments={"query": ["a"], "top": 1.5}), "arguments", "top must be integer, not number"),
        (call("python", {"code": "1", "fast": 0}), "arguments", "fast must be boolean, not integer"),
        (call("python", {"code": "1", "wait": None}), "arguments", "wait must be number, not null"),
        (call("python", {"code": "1", "lang": "c"}), "arguments", "unknown 'lang'"),
        (call(purpose=3), "purpose", "must be a string"),
    ],
)
def test_a_faulty_call_becomes_an_error_that_names_the_fault_and_the_right_form(
    text: str, kind: str, says: str
) -> None:
    found = hermes(text)
    assert found.calls == ()
    (error,) = found.errors
    assert error.kind == kind
    assert re.search(says, error.message)
    assert 'The right form is: <tool_call>{"name": "' in error.message
    assert '"purpose": ' in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize("purpose", ["", "  \n", None])
def test_r2_a_call_without_purpose_is_rejected_unless_purposes_are_switched_off(purpose: str | None) -> None:
    body = {"name": "search", "arguments": {"query": ["a"]}} | ({} if purpose is None else {"purpose": purpose})
    text = f"<tool_call>{json.dumps(body)}</tool_call>"
    assert [e.kind for e in hermes(text).errors] == ["purpose"]
    assert hermes(text).calls == ()
    assert hermes(text, require_purpose=False).calls == (ToolCall("search", {"query": ["a"]}, "", 0),)
    for tagged in (f"<search>a |{purpose or ''}</search>", "<search>a</search>"):
        assert [e.kind for e in tag(tagged).errors] == ["purpose"]
        assert tag(tagged).calls == ()
    assert tag("<search>a | b</search>", require_purpose=False).calls[0].arguments == {"query": ["a | b"]}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>{"name": "search", "arg',
        call()[: -len("</tool_call>")],
        call()[:-1],
        "<answer>Par",
    ],
)
def test_what_the_token_cap_cut_off_is_an_unclosed_error(text: str) -> None:
    found = hermes(text)
    assert [e.kind for e in found.errors] == ["unclosed"]
    assert (found.calls, found.answer) == ((), None)
    assert ("<answer>" in found.errors[0].message) == text.startswith("<answer>")


def test_attempts_keep_their_order_over_calls_and_errors() -> None:
    text = (
        call(purpose="1") + call("nope") + call(purpose="2") + "<tool_call>{" + call(purpose="3") + "<answer>x</answer>"
    )
    found = hermes(text)
    assert [(c.purpose, c.index) for c in found.calls] == [("1", 0), ("2", 2), ("3", 4)]
    assert [(e.kind, e.index) for e in found.errors] == [("unknown_tool", 1), ("unclosed", 3)]
    assert found.answer == "x"
    tagged = tag("<search>a | 1</search> <python> | x</python> <search>b <search>c | 2</search><python>")
    assert [(c.purpose, c.index) for c in tagged.calls] == [("1", 0), ("2", 3)]
    assert [(e.kind, e.index) for e in tagged.errors] == [("arguments", 1), ("unclosed", 2), ("unclosed", 4)]
    assert "The right form is: <python>QUERY | PURPOSE</python>" in tagged.errors[0].message


@pytest.mark.parametrize("more", [{}, {"purpose": ""}, {"name": "nope"}])
def test_an_answer_inside_a_calls_body_is_no_answer_even_when_the_call_is_faulty(more: dict) -> None:
    body = {"name": "python", "arguments": {"code": "<tool_call>{}</tool_call><answer>no</answer>"}, "purpose": "p"}
    text = f"<tool_call>{json.dumps(body | more)}</tool_call>"
    assert hermes(text).answer is None
    assert len(hermes(text).calls) + len(hermes(text).errors) == 1
    broken = '<tool_call>{"code": "<answer>no</answer>",}</tool_call>'
    assert (hermes(broken).answer, [e.kind for e in hermes(broken).errors]) == (None, ["malformed"])
    tagged = tag("<search>a <answer>no</answer></search><answer>yes</answer>")
    assert (tagged.answer, [e.kind for e in tagged.errors]) == ("yes", ["purpose"])
    assert tag("<search>a <answer>no</answer>").answer == "no"


def test_the_last_complete_answer_counts_and_an_empty_one_is_an_error() -> None:
    found = hermes("<answer>a</answer><answer>b</answer><answer> </answer><answer>c")
    assert found.answer == "b"
    assert [e.kind for e in found.errors] == ["empty_answer", "unclosed"]


def test_a_tag_fills_a_string_or_a_list_and_splits_at_the_last_bar() -> None:
    found = tag("<python>x = 1 | 2\nprint(x) | compute it</python><search>a | why</search>")
    assert found.calls[0] == ToolCall("python", {"code": "x = 1 | 2\nprint(x)"}, "compute it", 0)
    assert found.calls[1].arguments == {"query": ["a"]}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("two", {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}),
        ("none", {"properties": {"a": {"type": "string"}}}),
        ("number", {"properties": {"a": {"type": "number"}}, "required": ["a"]}),
        ("answer", CODE),
        ("a b", CODE),
    ],
)
def test_tools_that_no_tag_can_call_are_a_config_error(name: str, schema: dict) -> None:
    for use in (check_tag_tools, lambda tools: call_grammar("tag", tools), lambda tools: parse("", "tag", tools)):
        with pytest.raises(ConfigError, match=name):
            use({name: schema})


def test_usage_shows_every_tool_in_its_right_form() -> None:
    assert usage("tag", TOOLS) == "<search>QUERY | PURPOSE</search> or <python>QUERY | PURPOSE</python>"
    form = usage("hermes", TOOLS, "search", require_purpose=False)
    assert form == '<tool_call>{"name": "search", "arguments": {"query": <array of string>}}</tool_call>'


def test_ten_thousand_broken_calls_are_read_fast() -> None:
    begin = time.perf_counter()
    assert len(hermes("<tool_call>{" * 10_000).errors) == 10_000
    assert len(hermes("<think>" * 10_000 + call()).calls) == 0
    assert len(tag("<search>a" * 10_000).errors) == 10_000
    assert time.perf_counter() - begin < 10


# The grammar

BOTH = call_grammar("tag", TOOLS)
SHORT = call_grammar("tag", TOOLS, max_query_chars=6, max_purpose_chars=6, max_answer_chars=6)
BARE = call_grammar("tag", TOOLS, answer=False, require_purpose=False, max_query_chars=3)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.from_regex(SHORT.text, fullmatch=True))
def test_whatever_the_grammar_matches_is_one_call_or_one_answer(text: str) -> None:
    found = tag(text)
    assert found.errors == ()
    assert len(found.calls) + (found.answer is not None) == 1


@pytest.mark.parametrize("text", ["<search>a | b</search>", "<python>1+1 | b</python>", "<answer>Paris, I</answer>"])
def test_the_grammar_allows_every_form(text: str) -> None:
    assert re.fullmatch(BOTH.text, text)


@pytest.mark.parametrize(
    "text",
    [
        "<search>a</search>",
        "<search> | b</search>",
        "<search>a | </search>",
        "<answer></answer>",
        "<answer>a</answer><answer>b</answer>",
        "x<answer>a</answer>",
        "<answer>a<answer>b</answer>",
        "<answer>a\nb</answer>",
        f"<answer>{'a' * 121}</answer>",
    ],
)
def test_the_grammar_refuses_everything_else(text: str) -> None:
    assert not re.fullmatch(BOTH.text, text)


def test_the_grammar_follows_its_switches() -> None:
    assert re.fullmatch(BARE.text, "<search>abc</search>")
    assert not re.fullmatch(BARE.text, "<search>abcd</search>")
    assert not re.fullmatch(BARE.text, "<answer>a</answer>")
    assert re.fullmatch(call_grammar("tag", {}).text, "<answer>a</answer>")
    for faulty in ({"syntax": "hermes", "tools": TOOLS}, {"syntax": "tag", "tools": {}, "answer": False}):
        with pytest.raises(ConfigError):
            call_grammar(**faulty)


def test_llguidance_takes_the_grammar_and_follows_it_byte_by_byte(make_format) -> None:
    import llguidance
    import llguidance.hf
    from transformers import PreTrainedTokenizerFast

    chat = make_format("chatml", "byte_level")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chat._start, eos_token="<|im_end|>")
    for text in ("<search>capital of France | why é</search>", "<answer>Paris</answer>"):
        matcher = llguidance.LLMatcher(
            llguidance.hf.from_tokenizer(tokenizer), llguidance.grammar_from("regex", BOTH.text)
        )
        assert not matcher.is_error(), matcher.get_error()
        for token in chat.encode_world(text):
            assert not matcher.is_stopped()
            assert matcher.consume_token(token), text
        assert matcher.is_accepting()
        assert not matcher.try_consume_tokens(list(chat.encode_world("x")))
