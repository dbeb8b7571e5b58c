"""Who works when, in the five styles and in graphs of a user's own."""

from __future__ import annotations

import pytest

from agentrl.recipes.recursivemas.graph import Edge, Graph, ring
from agentrl.recipes.recursivemas.styles import STYLES


@pytest.mark.parametrize(
    ("style", "per_round"),
    [("sequential_light", 3), ("sequential_scaled", 3), ("mixture", 4), ("distillation", 2), ("deliberation", 2)],
)
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_t13_rollouts_per_question_are_kn_minus_1(style, per_round, rounds):
    assert STYLES[style].graph.rollouts(rounds) == per_round * rounds - 1


def test_t23_styles_have_the_papers_edges_and_decoders():
    keys = {name: {e.key for e in style.graph.edges} for name, style in STYLES.items()}
    assert keys == {
        "sequential_light": {"12", "23", "31"},
        "sequential_scaled": {"12", "23", "31"},
        "mixture": {"1s", "2s", "3s", "s1", "s2", "s3"},
        "distillation": {"el", "le"},
        "deliberation": {"rt", "tr"},
    }
    decoders = {name: style.graph.decoder for name, style in STYLES.items()}
    assert decoders == {
        "sequential_light": "solver",
        "sequential_scaled": "solver",
        "mixture": "summarizer",
        "distillation": "learner",
        "deliberation": "caller",
    }
    assert all(style.graph.problem() is None for style in STYLES.values())


def test_t23_the_summarizer_thinks_once_and_feeds_three_experts_back():
    mixture = STYLES["mixture"].graph
    assert mixture.working(1, 2) == ("math", "code", "science", "summarizer")
    assert mixture.working(2, 2) == ("math", "code", "science")
    assert [e.target for e in mixture.outgoing("summarizer", 1, 2)] == ["math", "code", "science"]
    assert [e.source for e in mixture.incoming("summarizer", 1)] == ["math", "code", "science"]


def test_t13_feedback_is_heard_from_round_2_and_not_sent_in_the_last():
    graph = ring("abc")
    assert graph.incoming("a", 1) == ()
    assert [e.source for e in graph.incoming("a", 2)] == ["c"]
    assert graph.outgoing("c", 1, 2) == (Edge("c", "a", feedback=True),)
    assert graph.outgoing("c", 2, 2) == ()
    assert [e.target for e in graph.outgoing("a", 2, 2)] == ["b"]


def test_one_round_uses_neither_feedback_nor_the_decoders_inner_link():
    graph = ring("abc")
    agents, edges = graph.used(1)
    assert (agents, [e.name for e in edges]) == (("a", "b"), ["a-b", "b-c"])
    assert graph.used(2) == (graph.agents, graph.edges)


def test_t15_one_round_has_no_feedback_rollout():
    assert ring("abc").working(1, 1) == ("a", "b")


def test_an_agent_that_only_feeds_back_rests_in_the_last_round():
    graph = Graph(("a", "b", "c"), (Edge("a", "c"), Edge("c", "b"), Edge("b", "a", feedback=True)), "c")
    assert graph.problem() is None
    assert graph.working(1, 2) == ("a", "c", "b")
    assert graph.working(2, 2) == ("a",)
    assert [e.target for e in graph.outgoing("a", 2, 2)] == ["c"]


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (Graph(("a", "b"), (Edge("a", "b"),), "x"), "decoder 'x'"),
        (Graph(("a", "b"), (Edge("a", "x"),), "b"), "edge a-x: there is no agent 'x'"),
        (Graph(("a", "b"), (Edge("a", "a"), Edge("a", "b")), "b"), "edge a-a"),
        (Graph(("a", "b"), (Edge("a", "b"), Edge("a", "b", True)), "b"), "twice"),
        (Graph(("a", "b"), (Edge("a", "b"), Edge("b", "a")), "b"), "form a circle"),
        (Graph(("a", "b"), (Edge("b", "a"),), "b"), "nothing leads from agent 'a'"),
        (Graph(("a-b", "b"), (Edge("a-b", "b"),), "b"), "'a-b'"),
    ],
)
def test_a_graph_that_is_no_recursion_is_named(graph, words):
    assert words in graph.problem()
