"""Turns, prompts and responses stay within their limits, whatever comes back (spec R8)."""

from __future__ import annotations

import random

from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.types import Task


def check_limits(out) -> None:
    s2, s1 = (out.recipe.agents[name] for name in (SYSTEM2, SYSTEM1))
    for trajectory in out.trajectories:
        mine = [t for t in trajectory.turns if t.agent_index == 0]
        assert len(mine) <= s2.max_turns + 1
        if not mine:
            continue
        start = len(mine[0].action.request.prompt)
        assert start <= s2.max_prompt_tokens
        last = mine[-1].action
        assert len(last.request.prompt) + len(last.completion.ids) - start <= s2.max_response_tokens
        for turn in mine:
            assert turn.action.request.sampling.max_tokens >= 1
        for turn in trajectory.turns:
            if turn.agent_index == 1:
                assert len(turn.action.request.prompt) <= s1.max_prompt_tokens
                assert len(turn.action.completion.ids) <= s1.max_response_tokens


WORDS = ["river ", "</search>", "<|im_end|>", "<tool_call>", "<answer>no</answer>", "\n\n", "é", "日本", "🦫", "x" * 30]


def test_r8_no_limit_is_passed_in_1000_synthetic_rollouts(roll, lab):
    rng = random.Random(11)

    def text(words: int) -> str:
        return "".join(rng.choice(WORDS) for _ in range(words))

    def search(arguments):
        size = rng.choice([0, 1, 5, 40, 400])
        return lab.pages(*(text(rng.choice([0, 3, 30, size])) for _ in range(rng.choice([0, 1, 2, 6]))))

    def think(request, prompt):
        kind = rng.random()
        if kind < 0.6:
            return text(rng.randrange(8)) + lab.call("q", text(rng.choice([1, 3, 3, 3, 200])))
        if kind < 0.75:
            return lab.call(purpose=None)
        return text(40) if kind < 0.9 else "<answer>x</answer>"

    def read(request, prompt):
        return text(rng.choice([0, 2, 10, 100]))

    agents = {
        SYSTEM2: {
            "max_prompt_tokens": 420,
            "max_response_tokens": 420,
            "max_turns": 2,
            "sampling": {"max_tokens": 300},
        },
        SYSTEM1: {"max_prompt_tokens": 260, "max_response_tokens": 50, "sampling": {"max_tokens": 200}},
    }
    tasks = [Task(f"q{i}", "Where? " * (1 + 20 * (i == 7)), ("x",)) for i in range(50)]
    out = roll(
        lab.script(think, read),
        [lab.tool(search)],
        agents=agents,
        mars={"answer_reserve": 30},
        tasks=tasks,
        group_size=20,
    )
    assert len(out.trajectories) == 1000
    check_limits(out)
    assert {t.status for t in out.trajectories} == {"ok", "truncated", "turn_limit", "failed"}
    assert {t.task.id for t in out.trajectories if t.status == "failed"} <= {"q7"}


def test_r8_the_limits_of_the_paper_hold_with_huge_pages(roll, lab):
    agents = {
        SYSTEM2: {"max_prompt_tokens": 3072, "max_response_tokens": 28_672, "max_turns": 10},
        SYSTEM1: {"max_prompt_tokens": 23_552, "max_response_tokens": 8192},
    }
    agents[SYSTEM2]["sampling"] = agents[SYSTEM1]["sampling"] = {"max_tokens": 8192}
    tool = lab.page_tool("the river " * 20_000, *("north " * 5000 for _ in range(4)))
    out = roll(
        lab.script([lab.call()], lambda *_: "north " * 9000),
        [tool],
        agents=agents,
        mars={"answer_reserve": 1024},
    )
    check_limits(out)
    assert out.only.counts["truncated_tokens"] > 0
    assert out.only.counts["merge_cap_hits"] > 0
    assert any(len(r.prompt) == 23_552 for r in out.asked(1))


def test_the_turn_limit_asks_once_more_without_tools(roll, lab):
    tool = lab.page_tool("page")
    agents = {SYSTEM2: {"max_turns": 3, "max_prompt_tokens": 900, "max_response_tokens": 1200}}
    out = roll(lab.script([lab.call()] * 3 + [lab.ANSWER]), [tool], agents=agents)
    assert (out.only.status, out.only.answer, out.only.counts["turns"]) == ("ok", "north", 4)
    assert "No more tool calls" in out.prompts(0)[3]
    assert "No more tool calls" not in out.prompts(0)[2]
    out = roll(lab.script([lab.call()]), [tool], agents=agents)
    assert (out.only.status, out.only.answer, out.only.counts["turns"]) == ("turn_limit", None, 4)
    assert out.only.counts["tool_calls"] == 3
    quiet = roll(lab.script([lab.call()]), [tool], agents=agents, mars={"answer_now": ""})
    assert "No more tool calls" not in quiet.seen_by_system2()


def test_without_a_final_answer_the_last_calls_are_not_executed(roll, lab):
    agents = {SYSTEM2: {"max_turns": 3, "max_prompt_tokens": 900, "max_response_tokens": 1200}}
    tool = lab.page_tool("page")
    out = roll(lab.script([lab.call()]), [tool], agents=agents, mars={"final_answer": False})
    assert (out.only.status, out.only.counts["turns"], len(tool.seen)) == ("turn_limit", 3, 2)


def test_a_call_at_the_token_cap_ends_without_executing_it(roll, lab):
    tool = lab.page_tool("page")
    call = lab.call()
    size = len(roll(lab.script([call, lab.ANSWER]), [tool]).only.turns[0].action.completion.ids)
    for budget in (size - 1, size, size + 2):
        tool.seen.clear()
        agents = {SYSTEM2: {"max_prompt_tokens": 900, "max_response_tokens": budget}}
        out = roll(lab.script([call]), [tool], agents=agents, mars={"answer_reserve": 10})
        assert (out.only.status, out.only.answer, tool.seen) == ("truncated", None, [])
        assert len(out.only.turns) == 1


def test_a_completion_cut_by_its_own_limit_is_answered_and_goes_on(roll, lab):
    tool = lab.page_tool("page")
    agents = {SYSTEM2: {"max_prompt_tokens": 900, "max_response_tokens": 1200, "sampling": {"max_tokens": 8}}}
    out = roll(lab.script([lab.call(), "<answer>n</answer>"]), [tool], agents=agents)
    assert tool.seen == []
    assert out.only.turns[0].action.completion.finish_reason == "length"
    assert out.only.turns[0].observation.error == "unclosed"
    assert out.only.counts["malformed/unclosed"] >= 1


def test_a_purpose_as_long_as_the_window_is_refused_unexecuted(roll, lab):
    tool = lab.page_tool("page")
    out = roll(
        lab.script([lab.call(purpose="why " * 500), lab.ANSWER]),
        [tool],
        agents={
            SYSTEM1: {"max_prompt_tokens": 300},
            SYSTEM2: {"max_prompt_tokens": 900, "max_response_tokens": 4000, "sampling": {"max_tokens": 4000}},
        },
    )
    assert (out.only.status, tool.seen) == ("ok", [])
    assert out.only.turns[0].observation.error == "purpose_too_long"
    assert out.only.counts["malformed_calls"] == 1
    assert not out.asked(1)


def test_a_prompt_that_does_not_fit_fails_the_rollout_with_its_reason(roll, lab):
    out = roll(lab.script([lab.ANSWER]), [], tasks=[Task("q", "Where? " * 900, ("x",))])
    assert out.only.status == "failed"
    assert "the prompt has" in out.only.status_reason
    assert out.requests == []
    assert lab.samples(out.only) == []


def test_a_turn_with_five_calls_shares_what_room_there_is(roll, lab, template):
    tool = lab.tool(lambda a: lab.pages(f"about {a['query']}"))
    read = lambda r, _: f"start{r.key.call} " + "word " * (100 if r.key.call else 3)  # noqa: E731
    text = "".join(lab.call(f"x{i}", "p") for i in range(5))
    agents = {
        SYSTEM2: {"max_prompt_tokens": 900, "max_response_tokens": 750, "max_turns": 1},
        SYSTEM1: {"max_prompt_tokens": 600, "max_response_tokens": 400, "sampling": {"max_tokens": 400}},
    }
    out = roll(
        lab.script([text, lab.ANSWER], read),
        [tool],
        mars={"stop_at_tags": False, "answer_reserve": 250},
        agents=agents,
        template=template,
    )
    assert out.only.status == "ok"
    assert out.only.counts["merge_cap_hits"] == 4
    told = out.prompts(0)[1]
    assert all(f"start{i}" in told for i in range(5))
    assert "No more tool calls are possible. Give your answer now: <answer>ANSWER</answer>" in told
    check_limits(out)


def test_what_is_cut_for_system_2_is_trained_whole_in_system_1(roll, lab):
    agents = {
        SYSTEM2: {"max_prompt_tokens": 900, "max_response_tokens": 220},
        SYSTEM1: {"max_prompt_tokens": 600, "max_response_tokens": 400, "sampling": {"max_tokens": 400}},
    }
    out = roll(lab.script([lab.call(), lab.ANSWER], "river " * 150), [lab.page_tool("page")], agents=agents)
    t = out.only
    assert t.status == "ok"
    assert t.counts["merge_cap_hits"] == 1
    assert t.counts["merge_cut_tokens"] > 20
    one = next(s for s in lab.samples(t) if s.part == SYSTEM1)
    assert one.num_trained == len(t.turns[1].action.completion.ids) > 150
    assert len(t.turns[0].observation.text) < len(t.turns[1].action.text)
    assert t.turns[0].observation.text in out.prompts(0)[1]
