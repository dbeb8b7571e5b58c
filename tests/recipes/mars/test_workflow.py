"""Who speaks when: purposes, bins, digests and ends (spec R2 to R7, R10)."""

from __future__ import annotations

import random
import secrets
import time

import pytest

from agentrl.protocols import ToolItem, ToolResult
from agentrl.recipes.mars.prompts import NO_RESULTS
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.types import Task


def test_a_call_is_distilled_and_the_digest_answers_it(roll, lab, template):
    tool = lab.page_tool("The river is in the north.", "Nothing here.")
    out = roll(lab.script([lab.call(), lab.ANSWER], "It is in the north."), [tool], template=template)
    t = out.only
    assert (t.status, t.answer) == ("ok", "north")
    assert tool.seen == [{"query": "river"}]
    assert [turn.action.agent for turn in t.turns] == [SYSTEM2, SYSTEM1, SYSTEM2]
    assert t.turns[1].parent == 0
    assert t.turns[2].parent is None
    assert "It is in the north." in out.prompts(0)[1]
    (read,) = out.prompts(1)
    assert "The river is in the north." in read
    assert "Nothing here." in read
    assert "find where it is" in read


def test_r2_a_call_without_purpose_is_never_executed_and_counted(roll, lab):
    tool = lab.page_tool("text")
    replies = [lab.call(purpose=None), lab.call(purpose="  "), lab.call(purpose=""), lab.ANSWER]
    t = roll(lab.script(replies), [tool]).only
    assert tool.seen == []
    assert t.counts["malformed_calls"] == 3
    assert t.counts["malformed/purpose"] == 3
    assert t.counts.get("tool_calls", 0) == 0
    assert t.status == "ok"
    assert t.counts["turns"] == 4
    assert "purpose" in t.turns[0].observation.text
    assert t.turns[0].observation.error == "purpose"


def test_r2_every_executed_call_carries_a_purpose(roll, lab):
    rng = random.Random(5)
    tool = lab.page_tool("text")
    purposes = [None, "", "why", " \n", "know it"]
    replies = [lab.call(purpose=rng.choice(purposes)) for _ in range(9)]
    t = roll(lab.script([*replies, lab.ANSWER]), [tool]).only
    executed = [turn for turn in t.turns if turn.agent_index == 0 and turn.observation and not turn.observation.error]
    assert len(executed) == len(tool.seen) > 0
    assert all(turn.observation.purpose.strip() for turn in executed)


@pytest.mark.parametrize("packing", ["ffd", "single", "truncate"])
def test_r3_raw_tool_text_never_reaches_system_2(roll, lab, packing, template):
    canaries = [secrets.token_hex(16) for _ in range(12)]
    tool = lab.page_tool(*(f"{c} " + "word " * (20 * i) for i, c in enumerate(canaries)))
    digests = lab.script([lab.call(), lab.call("x"), lab.ANSWER], "a digest")
    out = roll(digests, [tool], mars={"packing": packing}, template=template)
    assert out.only.status == "ok"
    assert not [c for c in canaries if c in out.seen_by_system2()]
    assert any(c in p for c in canaries for p in out.prompts(1))
    assert not [c for c in canaries for turn in out.only.turns if turn.observation and c in turn.observation.text]


def test_r3_long_error_output_is_distilled_too(roll, lab):
    canary = secrets.token_hex(16)
    long = lab.tool(lambda _: ToolResult((ToolItem("python", "line\n" * 400 + canary),), error="error"), "python")
    script = lab.script([lab.call("x", name="python"), lab.ANSWER], "it failed")
    out = roll(script, [long], agents={SYSTEM1: {"max_prompt_tokens": 3000}}, mars={"error_tokens": 50})
    assert canary not in out.seen_by_system2()
    assert canary in out.prompts(1)[0]
    assert out.only.turns[0].observation.error == "error"
    short = lab.tool(lambda _: ToolResult((ToolItem("python", f"NameError {canary}"),), error="error"), "python")
    out = roll(script, [short], mars={"error_tokens": 50})
    assert canary in out.seen_by_system2()
    assert not out.asked(1)


def test_r4_system_1_is_a_function_of_purpose_and_bin_alone(roll, lab):
    tool = lab.page_tool("page one", "page two")

    def prompts(first: str, query: str, question: str) -> bytes:
        script = lab.script([first, lab.call(query), lab.ANSWER])
        out = roll(script, [tool], tasks=[Task("q", question, ("x",))])
        return out.asked(1)[-1].prompt.ids

    base = prompts("I think about it.", "a", "Where?")
    assert prompts(lab.call("z", "another matter"), "b", "Something else entirely?") == base


def test_r4_the_question_is_shown_only_behind_its_switch(roll, lab):
    tool = lab.page_tool("page")
    script = lab.script([lab.call(), lab.ANSWER])
    assert "river" not in roll(script, [tool]).prompts(1)[0]
    shown = {"include_question": True, "distil_template": "{question}\n{items}\n{purpose}"}
    assert lab.QUESTION.question in roll(script, [tool], mars=shown).prompts(1)[0]


def test_r5_a_purpose_changes_every_prompt_of_its_call_and_no_other(roll, lab):
    tool = lab.page_tool(*("word " * 100 for _ in range(6)))

    def by_call(purpose: str) -> dict[int, list[tuple[int, ...]]]:
        out = roll(lab.script([lab.call(purpose=purpose), lab.call("y", "the same"), lab.ANSWER]), [tool])
        return {t: [r.prompt.ids for r in out.asked(1) if r.key.turn == t] for t in (0, 1)}

    one, two = by_call("who built it"), by_call("when was it built")
    assert len(one[0]) > 1
    assert len(one[0]) == len(two[0])
    assert all(a != b for a, b in zip(one[0], two[0], strict=True))
    assert one[1] == two[1]


def test_r6_one_concurrent_system_1_call_per_bin(roll, lab):
    latency = 0.25
    tool = lab.page_tool(*("w " * 240 for _ in range(16)))
    arrived: list[float] = []

    def read(request, prompt):
        arrived.append(time.monotonic())
        return "d"

    out = roll(
        lab.script([lab.call(), lab.ANSWER], read),
        [tool],
        mars={"packing": "single"},
        latency_s=latency,
    )
    t = out.only
    assert t.counts["bins"] == len(out.asked(1)) == t.counts["s1_calls"] == 16
    # The engine would start the next only a latency later if they waited for each other.
    assert max(arrived) - min(arrived) < 0.5 * latency


def test_r6_calls_per_bin_when_packed(roll, lab):
    tool = lab.page_tool(*("word " * 100 for _ in range(7)))
    out = roll(lab.script([lab.call(), lab.ANSWER]), [tool])
    per_bin = [p.count("page ") for p in out.prompts(1)]
    assert sum(per_bin) == 7
    assert 1 < len(per_bin) < 7
    assert out.only.counts["bins"] == len(per_bin) == len({r.key.bin for r in out.asked(1)})
    assert out.only.counts["distilled_calls"] == 1


def test_r7_the_digest_does_not_depend_on_the_order_of_completion(roll, lab):
    tool = lab.page_tool(*(f"w{i} " * (30 + 17 * (i % 5)) for i in range(10)))

    def read(request, prompt):
        return f"digest of bin {request.key.bin}"

    script = lab.script([lab.call(), lab.ANSWER], read)
    order = []
    out = roll(script, [tool], group_size=100, wrap=lambda e: lab.Shuffled(e, random.Random(3), order))
    ends = {tuple(key.bin for key in order if key.g == g and key.agent == 1) for g in range(100)}
    assert len(ends) > 15
    seen = {(r.prompt.ids, out.trajectories[r.key.g].turns[0].observation.text) for r in out.asked(0) if r.key.turn}
    assert len(seen) == 1
    lines = seen.pop()[1].splitlines()
    assert len(lines) > 2
    assert lines == [f"digest of bin {i}" for i in range(len(lines))]


def test_bins_are_merged_in_the_order_of_their_first_item(roll, lab):
    # The long page opens the first bin of the packing, but the short one came first.
    tool = lab.page_tool("w " * 20, "LONG " * 100, "w " * 260)
    read = lambda _, prompt: "long" if "LONG" in prompt else "short"  # noqa: E731
    out = roll(lab.script([lab.call(), lab.ANSWER], read), [tool])
    firsts = [min(i for i in range(3) if f"page {i}" in p) for p in out.prompts(1)]
    assert firsts == sorted(firsts)
    assert len(firsts) == 2


def test_r10_a_direct_answer_needs_no_tool(roll, lab, template):
    out = roll(lab.script([lab.ANSWER]), [lab.page_tool("x")], template=template)
    assert (out.only.status, out.only.answer, len(out.only.turns)) == ("ok", "north", 1)
    (only,) = lab.samples(out.only)
    assert only.part == SYSTEM2
    assert roll(lab.script([lab.ANSWER]), [], template=template).only.answer == "north"


def test_p6_items_of_two_calls_never_share_a_bin(roll, lab):
    tool = lab.tool(lambda a: lab.pages(*(f"{a['query']} text {i}" for i in range(3))))
    both = lab.call("alpha", "first") + lab.call("beta", "second") + lab.call("gamma", "third")
    out = roll(lab.script([both, lab.ANSWER]), [tool], mars={"stop_at_tags": False})
    prompts = out.prompts(1)
    assert len(prompts) == 3
    assert [r.key.call for r in out.asked(1)] == [0, 1, 2]
    for word, purpose, prompt in zip(("alpha", "beta", "gamma"), ("first", "second", "third"), prompts, strict=True):
        assert prompt.count(f"{word} text") == 3
        assert purpose in prompt
        assert not [w for w in {"alpha", "beta", "gamma"} - {word} if f"{w} text" in prompt]


def test_no_results_are_told_in_words_and_make_no_system_1_sample(roll, lab):
    out = roll(lab.script([lab.call(), lab.ANSWER]), [lab.page_tool()])
    assert NO_RESULTS in out.prompts(0)[1]
    assert not out.asked(1)
    assert len(lab.samples(out.only)) == 1


@pytest.mark.parametrize(
    "digest", ["", "  \n", "nothing relevant", "Nothing relevant.", "<think>hm</think>", "<think>"]
)
def test_a_digest_that_says_nothing_leaves_one_line(roll, lab, digest):
    tool = lab.page_tool(*("w " * 200 for _ in range(4)))
    out = roll(lab.script([lab.call(), lab.ANSWER], digest), [tool])
    assert len(out.asked(1)) > 1
    assert out.only.turns[0].observation.text == "nothing relevant"
    mixed = lambda r, _: "found it" if r.key.bin == 1 else digest  # noqa: E731
    out = roll(lab.script([lab.call(), lab.ANSWER], mixed), [tool])
    assert out.only.turns[0].observation.text == "found it"


def test_the_tag_syntax_speaks_the_same_loop(roll, lab, template):
    tool = lab.page_tool("page")
    replies = ["<search>river | find it</search>", "<search>no purpose</search>", lab.ANSWER]
    out = roll(lab.script(replies), [tool], mars={"call_syntax": "tag"}, template=template)
    assert (out.only.status, tool.seen) == ("ok", [{"query": "river"}])
    assert out.only.counts["malformed/purpose"] == 1


def test_short_results_may_skip_system_1(roll, lab):
    out = roll(lab.script([lab.call(), lab.ANSWER]), [lab.page_tool("a page")], mars={"bypass_tokens": 30})
    assert "a page" in out.prompts(0)[1]
    assert not out.asked(1)
    assert out.only.counts.get("bins", 0) == out.only.counts.get("distilled_calls", 0) == 0
    out = roll(lab.script([lab.call(), lab.ANSWER]), [lab.page_tool("a page " * 30)], mars={"bypass_tokens": 30})
    assert len(out.asked(1)) == 1
