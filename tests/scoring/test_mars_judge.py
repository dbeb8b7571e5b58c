"""`reward: judge` in MARS: a whole evaluation against a local judge, and what `check` says of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai import serving

from agentrl.errors import MissingError
from agentrl.preflight.check import check
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.evaluate import evaluate
from agentrl.recipes.registry import VerbOptions, load_recipe
from agentrl.scoring.judge import CANARIES

SHIPPED = Path(__file__).parents[2] / "recipes"
NO = json.dumps({"extracted_answer": "x", "reasoning": "differs", "correct": "no", "confidence": 1})
YES = NO.replace('"no"', '"yes"')


def _recipe(url: str, runs: Path, **judge: Any) -> MarsRecipe:
    section = json.dumps({"model": "fake", "base_url": url, "backoff_s": 0.0, "max_retries": 0} | judge)
    overrides = [
        "model.name=tiny-llama",
        "model.dtype=float32",
        "reward=judge",
        f"judge={section}",
        "data.eval.limit=3",
        f"run.dir={runs}",
    ]
    tree = load_recipe(str(SHIPPED / "mars-embedded.yaml"), overrides).tree
    assert isinstance(tree, MarsRecipe)
    return tree


def test_e1_mars_is_rewarded_by_the_judge_with_one_call_per_answered_trajectory(tmp_path: Path) -> None:
    with serving(lambda n, body: (200, YES)) as fake:
        summary = evaluate(_recipe(fake.url, tmp_path, canaries=False, price={"per_call": 0.25}), VerbOptions())
    rollouts = summary["rollouts"]
    answered = summary["eval"]["k"]
    assert summary["eval"]["n"] == 3
    assert answered == len(fake.requests) == rollouts.get("judge/calls", 0)
    assert answered == 3, "under the grammar every trajectory has an answer"
    assert rollouts["judge/cost_usd"] == 0.75
    assert rollouts["reward/mean"] == 1.0


def test_e1_a_judge_that_fails_midway_gives_missing_rewards(tmp_path: Path) -> None:
    with serving(lambda n, body: (200, YES) if n == 0 else (500, {})) as fake:
        summary = evaluate(_recipe(fake.url, tmp_path, canaries=False), VerbOptions())
    assert summary["eval"]["n"] == 1
    assert summary["eval"]["missing"] == 2
    assert summary["rollouts"]["reward/missing"] == 2


def test_a_judge_that_is_not_there_ends_the_command_before_anything_loads(tmp_path: Path) -> None:
    recipe = _recipe("http://127.0.0.1:9/v1", tmp_path)
    broken = recipe.model_copy(update={"model": recipe.policy_models["policy"].model_copy(update={"name": "none"})})
    with pytest.raises(MissingError, match="ruled on none of 8 items"):
        evaluate(broken, VerbOptions())


def test_a_judge_that_rules_wrongly_on_known_items_is_told_of(tmp_path: Path) -> None:
    class Notes:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def begin(self, total: int, first: int = 1) -> None: ...
        def phase(self, name: str, done: int = 0, of: int = 0) -> None: ...
        def log(self, step: int, metrics: Any) -> None: ...
        def note(self, text: str) -> None:
            self.texts.append(text)

    notes = Notes()
    with serving(lambda n, body: (200, YES)) as fake:
        evaluate(_recipe(fake.url, tmp_path), VerbOptions(progress=notes))
        assert len(fake.requests) == len(CANARIES) + 3
    assert any("ruled wrongly" in text and "injection" in text for text in notes.texts)


def test_check_has_nothing_against_a_judge(tmp_path: Path) -> None:
    loaded = load_recipe(str(SHIPPED / "hle.yaml"))
    errors = {f.key for f in check(loaded) if f.level == "error"}
    assert {"tools.web", "tools.scholar"} <= errors
    assert not {key for key in errors if key.startswith("judge")}


def test_a_judges_tries_again_are_counted_in_the_metrics(tmp_path: Path) -> None:
    replies = {0: (200, "banana"), 1: (500, {"error": "down"})}
    with serving(lambda n, body: replies.get(n, (200, YES))) as fake:
        changes = {"canaries": False, "price": {"per_call": 0.25}, "max_concurrent": 1, "max_retries": 2}
        summary = evaluate(_recipe(fake.url, tmp_path, **changes), VerbOptions())
    counted = {key: value for key, value in summary["rollouts"].items() if key.startswith("judge/")}
    assert counted == {"judge/calls": 5, "judge/retries": 2, "judge/unreadable": 1, "judge/cost_usd": 1.0}
    assert len(fake.requests) == 5
