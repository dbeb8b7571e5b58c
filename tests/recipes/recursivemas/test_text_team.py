"""The text team: its members hear texts, cut where a window ends."""

from __future__ import annotations

import pytest
from held_out import QUESTIONS

from agentrl.errors import DataError
from agentrl.types import Embeddings, Task


def test_t25_a_message_changes_what_the_decoder_hears(make_held_out, make_system):
    """The channel of the text team is causal: with other words in the question of one agent, prompts differ."""
    from agentrl.recipes.recursivemas.text_team import TextTeam

    recipe = make_held_out(text_team={"max_tokens": 4}, controls=("text",))
    _, loaded = make_system()
    written = TextTeam(recipe, loaded).write([Task("a", QUESTIONS[0][1])], "eval")
    chat = loaded.system.agents["solver"].chat
    last = written.stages[-1].actions[0]
    assert last.agent == "critic"
    assert last.text.strip() in chat.format.decode(written.prompts[0].ids)
    assert not any(isinstance(s, Embeddings) for s in written.prompts[0].segments)


def test_t25_messages_of_natural_length_end_where_the_writer_ends(make_held_out, make_system):
    from agentrl.recipes.recursivemas.text_team import TextTeam

    _, loaded = make_system()
    tasks = [Task(i, q) for i, q, _ in QUESTIONS]
    ends = loaded.policies["planner"].eos_ids
    for own, exact in (({"max_tokens": 40}, False), ({"max_tokens": 40, "exact": True}, True)):
        recipe = make_held_out(text_team=own, controls=("text",), sampling={"temperature": 1.0})
        stages = TextTeam(recipe, loaded).write(tasks, "eval").stages
        ids = [a.completion.ids for s in stages if s.agent == "planner" for a in s.actions]
        assert all(not set(i[:-1]) & set(ends) for i in ids)
        if exact:
            assert all(len(i) == 40 and i[-1] not in ends for i in ids)
    natural = make_held_out(controls=("text",), sampling={"max_tokens": 7})
    lengths = [len(a.completion.ids) for s in TextTeam(natural, loaded).write(tasks, "eval").stages for a in s.actions]
    assert max(lengths) == 7


def test_messages_that_do_not_fit_a_window_are_cut_and_counted(make_held_out, make_system):
    from agentrl.recipes.recursivemas.text_team import TextTeam

    _, loaded = make_system()
    recipe = make_held_out(controls=("text",), sampling={"max_tokens": 400}, rounds=1)
    narrow = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_model_len": 420})})
    written = TextTeam(narrow, loaded).write([Task("a", QUESTIONS[0][1])], "eval")
    assert written.cut[0] > 0
    assert len(written.prompts[0]) < 420
    assert all(len(a.request.prompt) + len(a.completion.ids) <= 420 for s in written.stages for a in s.actions)


def test_a_prompt_beyond_the_engines_length_is_refused_and_cuts_no_message_from_the_end(make_held_out, make_system):
    from agentrl.recipes.recursivemas.infer import refuse_long
    from agentrl.recipes.recursivemas.text_team import TextTeam

    _, loaded = make_system()
    recipe = make_held_out(controls=("text",))
    narrow = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_model_len": 8})})
    task = Task("a", QUESTIONS[0][1])
    with pytest.raises(DataError, match="is 8"):
        refuse_long(narrow, loaded, [task])
    team, graph = TextTeam(narrow, loaded), recipe.recursivemas.graph
    edge = next(e for e in graph.incoming(graph.decoder, 1))
    (asked,) = team._asked(graph.decoder, 1, [task], {edge: ("one two three four",)})
    (empty,) = team._asked(graph.decoder, 1, [task], {edge: ("",)})
    assert asked.prompt.ids == empty.prompt.ids
    assert asked.cut == len(loaded.system.agents[graph.decoder].chat.format.encode_world("one two three four"))
