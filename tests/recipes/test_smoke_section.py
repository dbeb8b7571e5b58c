"""A recipe's own section `smoke` is validated by every verb, with and without --smoke."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agentrl.config.problems import RecipeError
from agentrl.config.shipped import resolve_recipe, shipped_recipes
from agentrl.recipes.registry import METHODS, load_recipe

VERBS = [(method, verb) for method in METHODS for verb in METHODS[method].verbs if verb != "preview"]


def _recipe(method: str, section: str) -> tuple[str, int]:
    """A shipped recipe with a smoke section: its file, and the line that the section begins on."""
    text = resolve_recipe(f"smoke/{method}").read_text(encoding="utf-8")
    Path("mine.yaml").write_text(text + section, encoding="utf-8")
    return "mine.yaml", len(text.splitlines()) + 1


@pytest.mark.parametrize("flags", [(), ("--smoke",)], ids=["plain", "smoke"])
@pytest.mark.parametrize(("method", "verb"), [*VERBS, ("mars", "check")])
def test_every_verb_finds_a_typo_in_the_smoke_section(cli, method, verb, flags):
    recipe, line = _recipe(method, "smoke:\n  optim:\n    weight_decai: 0.1\n")
    command = ("check", recipe) if verb == "check" else (method, verb, recipe)
    ask = ("--question", "What?") if verb == "infer" else ()
    done = cli(*command, *ask, *flags)
    fault = f"mine.yaml:{line + 2}: optim.weight_decai: unknown key (given 0.1)"
    done.two_lines(2, fault, "did you mean optim.weight_decay?")
    assert done.err.count("error: ") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("section", "below", "fault", "fix"),
    [
        ("smoke:\n  optmi: {lr: 1.0}\n", 1, "optmi: unknown key", "did you mean optim?"),
        ("smoke:\n  optim:\n    lrr: null\n", 2, "optim.lrr: unknown key (given null)", "did you mean optim.lr?"),
        ("smoke:\n  optmi: {}\n", 1, "optmi: unknown key", "did you mean optim?"),
        ("smoke:\n  run: {steps: -1}\n", 1, "run.steps: got -1, expected a whole number of at least 0", "run.steps"),
        ("smoke:\n  run: 3\n", 1, "run: got 3, expected a section", "run"),
        ("smoke:\n  method: mappa\n", 1, 'method: got "mappa", expected mars', ""),
        ("smoke:\n  smoke: {run: {steps: 1}}\n", 1, "smoke: unknown key", ""),
        (
            "smoke:\n  agents:\n    system2:\n      examples:\n      - role: user\n        content: a\n"
            "      - {role: usher, content: b}\n",
            6,
            'agents.system2.examples.1.role: got "usher"',
            "did you mean role: user?",
        ),
        ("smoke:\n  rollout: {group_size: 4}\n  rollout: {group_size: 2}\n", 2, "smoke.rollout: given twice", ""),
    ],
)
def test_a_fault_in_the_smoke_section_is_told_at_its_line_without_the_flag(folder, section, below, fault, fix):
    recipe, line = _recipe("mars", section)
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert f"mine.yaml:{line + below}: {fault}" in caught.value.cause
    assert fix in caught.value.fix
    with pytest.raises(RecipeError) as again:
        load_recipe(recipe, smoke=True)
    assert again.value.problems == caught.value.problems


def test_a_secret_in_the_smoke_section_is_refused_and_not_repeated(folder):
    recipe, line = _recipe("mappa", "smoke:\n  coach:\n    api_key: sk-0123456789abcdef\n")
    with pytest.raises(RecipeError, match=f"mine.yaml:{line + 2}: coach.api_key: a secret in a recipe") as caught:
        load_recipe(recipe)
    assert "0123456789" not in str(caught.value)


def test_a_key_outside_that_the_section_makes_wrong_is_told_at_the_section(folder):
    """`optim.min_lr_ratio` is right in the recipe; only the smoke form with a constant schedule has no use for it."""
    text = resolve_recipe("smoke/mars").read_text(encoding="utf-8")
    text = text.replace("optim:\n", "optim:\n  schedule: cosine\n  min_lr_ratio: 0.5\n")
    text += "smoke:\n  optim: {schedule: constant}\n"
    Path("mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml")
    assert f"mine.yaml:{len(text.splitlines())}: smoke: with it, mine.yaml:" in caught.value.cause
    assert "min_lr_ratio: has no effect with schedule: constant" in caught.value.cause


def test_faults_of_the_recipe_and_of_its_smoke_section_are_listed_together(folder):
    recipe, _ = _recipe("mars", "tols: {}\nsmoke:\n  run: {stepps: 1}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert [problem.key for problem in caught.value.problems] == ["tols", "run.stepps"]


def test_a_recipe_that_waits_for_a_set_is_not_refused_for_its_smoke_section(folder):
    Path("mine.yaml").write_text(
        "method: mars\nmodel: {dtype: float32}\nrun: {steps: 1}\nsmoke:\n  run: {seed: 5}\n", encoding="utf-8"
    )
    assert load_recipe("mine.yaml", ("model.name=tiny-llama",)).tree.run.seed == 0
    assert load_recipe("mine.yaml", smoke=True).tree.run.seed == 5


def test_smoke_sections_of_shipped_recipes_cost_check_little(folder):
    own = [n for n, file in shipped_recipes().items() if "\nsmoke:\n" in file.read_text(encoding="utf-8")]
    assert own
    load_recipe(own[0])
    start = time.perf_counter()
    for name in own:
        load_recipe(name)
    each = (time.perf_counter() - start) / len(own)
    assert each < (0.5 if os.getloadavg()[0] < (os.cpu_count() or 1) else 2.0)


@pytest.mark.parametrize("smoke", [False, True], ids=["plain", "smoke"])
@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("recursivemas", "recursivemas", "text"),
        ("recursivemas", "recursivemas", "[]"),
        ("recursivemas", "recursivemas.style", "{a: 1}"),
        ("recursivemas", "recursivemas.style", "[a]"),
        ("recursivemas", "agents", "2.5"),
        ("recursivemas", "agents", "[]"),
        ("mappa", "agents", "[1]"),
        ("mars", "agents", "3"),
    ],
)
def test_values_of_a_wrong_kind_reach_validation_whatever_shape_they_have(folder, method, key, value, smoke):
    """The parts that look at values before validation leave to it what they cannot read."""
    text = f"method: {method}\nmodel: {{name: tiny-llama}}\nrun: {{steps: 1}}\nsmoke: {{run: {{seed: 1}}}}\n"
    head, _, last = key.rpartition(".")
    Path("mine.yaml").write_text(text + (f"{head}: {{{last}: {value}}}\n" if head else f"{last}: {value}\n"))
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml", smoke=smoke)
    assert f"mine.yaml:5: {key}: got " in " ".join(cause for cause, _ in caught.value.faults)


def test_a_smoke_form_is_made_of_any_values(folder):
    """What its cut replaces may be of a wrong kind; the recipe itself is refused for it."""
    for method, key in [("recursivemas", "data.path"), ("recursivemas", "recursivemas.decoder"), ("mappa", "data")]:
        for value in ("[a]", "{a: 1}", "3"):
            text = resolve_recipe(f"smoke/{method}").read_text(encoding="utf-8")
            Path("mine.yaml").write_text(text + "smoke: {run: {seed: 1}}\n")
            with pytest.raises(RecipeError, match=rf"--set {key}: {key}(: got |\.a: unknown key)"):
                load_recipe("mine.yaml", (f"{key}={value}",))
    text = resolve_recipe("mathchat").read_text(encoding="utf-8")
    for value in ("[a]", "many", "null"):
        Path("mine.yaml").write_text(text.replace("max_turns:", f"max_turns: {value} #"))
        with pytest.raises(RecipeError, match="max_turns: got "):
            load_recipe("mine.yaml")
        assert load_recipe("mine.yaml", smoke=True).tree.run.steps == 2
