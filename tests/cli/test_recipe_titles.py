from __future__ import annotations

import json


def test_a_title_is_the_first_sentence_and_not_the_first_line(agentrl):
    titles = {row["name"]: row["title"] for row in json.loads(agentrl("recipes", "list", "--json").out)}
    assert titles["embedded-ring"].endswith("who hears the relay's, says the answer")
    assert titles["mars-embedded"] == "A small real model learns to search, from zero, on two CPU cores"
