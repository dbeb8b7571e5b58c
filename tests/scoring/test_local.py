"""A model in this process as a coach: its replies are in form by the grammar, and reproducible."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.config.schema import CoachConfig, EngineConfig
from agentrl.models import resolve
from agentrl.protocols import CoachView
from agentrl.rollout.engine import make_engine
from agentrl.rollout.gate import Gate
from agentrl.scoring.coach import LLMCoach, make_coach
from agentrl.scoring.local import bounded
from agentrl.types import Score, Task

VIEW = CoachView(Task("t", "6 times 7?"), "solver", "solve it", "6 times 7?", "it is 42", None)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _scores(views: list[CoachView], window: int | None = None, **config: Any) -> list[Score]:
    folder = resolve("tiny-llama")
    section = CoachConfig(**{"kind": "local", "model": "tiny-llama", "max_tokens": 200, "max_retries": 0} | config)

    async def run() -> list[Score]:
        engine = make_engine(
            EngineConfig(kind="hf"),
            {"coach": folder},
            dtype="float32",
            seed=0,
            gate=Gate(),
            max_model_len=window,
        )
        chat = Chat(ChatFormat.from_folder(folder), enable_thinking=False)
        coach = make_coach(section, load=lambda key, name: None, engine=engine, chat=chat)
        assert isinstance(coach, LLMCoach)
        try:
            return await asyncio.gather(*(coach.score(v) for v in views))
        finally:
            await coach.close()
            await engine.close()

    return asyncio.run(run())


def test_x03_a_local_model_scores_in_form_whatever_it_would_rather_say() -> None:
    views = [replace(VIEW, action=f"it is {i}") for i in range(4)]
    scores = _scores(views, temperature=1.0)
    assert all(s.value is not None and 0 <= s.value <= 10 for s in scores), [s.reason for s in scores]
    assert all(s.value == int(s.value or 0) for s in scores)
    assert scores[0].info["calls"] == 1
    assert scores[0].info["input_tokens"] > 100
    assert scores == _scores(views, temperature=1.0)


def test_what_a_local_model_samples_does_not_depend_on_its_neighbours() -> None:
    views = [replace(VIEW, action=f"it is {i}") for i in range(3)]
    assert [s.value for s in _scores(views, temperature=1.0)][2] == _scores(views[2:], temperature=1.0)[0].value


def test_a_case_that_does_not_fit_the_window_is_missing() -> None:
    (score,) = _scores([VIEW], window=64)
    assert score.missing
    assert "does not fit" in (score.reason or "")


def test_a_reply_that_is_cut_by_its_limit_is_missing() -> None:
    (score,) = _scores([VIEW], temperature=1.0, max_tokens=16)
    assert score.missing
    assert "cut at max_tokens" in (score.reason or "")


def test_free_strings_are_bounded_so_that_the_reply_can_end() -> None:
    schema = {"type": "object", "properties": {"why": {"type": "string"}, "yes": {"type": "string", "enum": ["a"]}}}
    out = bounded(schema, 148)
    assert out["properties"] == {"why": {"type": "string", "maxLength": 50}, "yes": {"type": "string", "enum": ["a"]}}
    assert json.loads(json.dumps(schema))["properties"]["why"] == {"type": "string"}
