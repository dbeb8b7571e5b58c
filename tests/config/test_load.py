from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from agentrl.config.load import Loaded, dump_yaml, load
from agentrl.config.problems import RecipeError
from agentrl.config.schema import BaseRecipe, Section
from agentrl.config.source import MAX_BYTES
from agentrl.errors import ConfigError


class ToyConfig(Section):
    rounds: int = Field(3, ge=1, le=9)
    weights: tuple[float, ...] = (1.0, 2.0)
    mode: Literal["fast", "slow", "off"] = "fast"
    note: str = ""


class ToyRecipe(BaseRecipe):
    method: Literal["toy"]
    toy: ToyConfig = ToyConfig()

    @classmethod
    def smoke(cls) -> dict[str, Any]:
        return {
            "model": {"name": "tiny-llama"},
            "engine.kind": "hf",
            "run": {"steps": 2},
            "toy.weights": [5.0],
            "tools.search": None,
            "policies": None,
        }


def toy_schema(method: str) -> type[BaseRecipe]:
    if method != "toy":
        raise ConfigError(f"unknown method {method!r}", "did you mean toy?")
    return ToyRecipe


GOOD = """\
method: toy
# a comment
model:
  name: org/model
engine:
  kind: hf
tools:
  search:
    corpus: pages.jsonl
optim:
  lr: 1e-5
toy:
  weights: [1, 2.5, 3]
run:
  steps: 10
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe `x.yaml` in the current folder and loads it."""
    monkeypatch.chdir(tmp_path)

    def make(text: str | bytes = GOOD, *overrides: str, smoke: bool = False) -> Loaded:
        data = text if isinstance(text, bytes) else text.encode()
        Path("x.yaml").write_bytes(data)
        return load("x.yaml", toy_schema, list(overrides), smoke)

    return make


def problems(make, *args, **kwargs):
    with pytest.raises(RecipeError) as caught:
        make(*args, **kwargs)
    assert caught.value.exit_code == 2
    found = [(p.cause, p.fix) for p in caught.value.problems]
    assert all("\n" not in part for pair in found for part in pair)
    return found


def only(make, *args, **kwargs) -> tuple[str, str]:
    found = problems(make, *args, **kwargs)
    assert len(found) == 1, found
    return found[0]


def test_loads_values_and_tells_where_each_leaf_came_from(recipe):
    loaded = recipe(GOOD, "run.seed=7", smoke=False)
    assert loaded.tree.optim.lr == 1e-5
    assert loaded.tree.toy.weights == (1.0, 2.5, 3.0)
    assert loaded.tree.run.seed == 7
    origins = loaded.origins
    assert origins["optim.lr"] == "x.yaml:11"
    assert origins["toy.weights"] == "x.yaml:13"
    assert origins["optim.eps"] == "default"
    assert origins["run.seed"] == "--set"
    assert origins["method"] == "x.yaml:1"
    assert loaded.source == Path("x.yaml")


def test_smoke_comes_after_yaml_and_set_after_smoke(recipe):
    loaded = recipe(GOOD, "run.steps=5", "engine.max_batch=3", smoke=True)
    assert loaded.tree.run.steps == 5
    assert loaded.tree.model.name == "tiny-llama"
    assert loaded.tree.toy.weights == (5.0,)  # lists are replaced whole
    assert loaded.tree.tools.search is None  # None sets null where null is allowed
    assert loaded.tree.policies == {}  # and brings the default back where it is not
    assert loaded.origins["model.name"] == "smoke"
    assert loaded.origins["run.steps"] == "--set"
    assert loaded.origins["tools.search"] == "smoke"
    assert loaded.origins["policies"] == "smoke"
    assert loaded.origins["model.dtype"] == "default"
    assert loaded.origins["engine.max_batch"] == "--set"


def test_smoke_drops_policies_and_their_lines(recipe):
    text = GOOD.replace("model:\n  name: org/model", "policies:\n  a:\n    name: big")
    loaded = recipe(text, smoke=True)
    assert loaded.tree.policies == {}
    assert loaded.tree.model.name == "tiny-llama"


def test_a_set_mapping_gives_its_leaves_their_origin(recipe):
    loaded = recipe(GOOD, "toy={rounds: 4, mode: slow}")
    assert loaded.tree.toy.rounds == 4
    assert loaded.origins["toy.rounds"] == "--set"
    assert loaded.origins["toy.weights"] == "default"


def test_last_set_of_a_key_counts(recipe):
    assert recipe(GOOD, "run.seed=1", "run.seed=2").tree.run.seed == 2


def test_set_null_and_set_below_null(recipe):
    loaded = recipe(GOOD, "tools.search=null", "tools.search.corpus=other.jsonl", "optim.max_grad_norm=null")
    assert loaded.tree.tools.search.corpus == "other.jsonl"
    assert loaded.tree.optim.max_grad_norm is None


def test_resolved_yaml_reads_back_to_the_same_tree(recipe):
    tree = recipe(GOOD, "optim.lr=3e-7").tree
    text = dump_yaml(tree)
    assert text.startswith("method: toy\n")
    assert recipe(text).tree == tree


def test_checkpoint_of_a_recipe_with_policies_goes_to_each_policy(recipe):
    text = GOOD.replace("model:\n  name: org/model", "policies:\n  a:\n    name: m\n  b:\n    name: n")
    tree = recipe(text, 'model.checkpoint="runs/x@step"').tree
    assert {p.checkpoint for p in tree.policies.values()} == {"runs/x@step"}


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-5", "1.0e-5", "0.00001", "+1e-5", "1_0e-6"])
def test_every_way_to_write_a_float_is_a_float(recipe, text):
    assert recipe(GOOD.replace("1e-5", text)).tree.optim.lr == pytest.approx(1e-5)


@pytest.mark.parametrize("word", ["no", "off", "on", "yes", "2024-01-01", "1:30", "0x", "012"])
def test_words_that_yaml_once_turned_into_other_types_stay_text(recipe, word):
    assert recipe(GOOD + f"# end\ndata:\n  split: {word}\n").tree.data.split == word


def test_literal_off_is_text_and_not_false(recipe):
    assert recipe(GOOD, "toy.mode=off").tree.toy.mode == "off"


@pytest.mark.parametrize(
    ("before", "after", "line", "key", "hint"),
    [
        ("method: toy\n", "method: toy\noptin: {lr: 1}\n", 2, "optin", "did you mean optim?"),
        ("  lr: 1e-5", "  lrr: 1e-5", 11, "optim.lrr", "did you mean optim.lr?"),
        ("    corpus: pages.jsonl", "    corpus: p\n    topk: 3", 10, "tools.search.topk", "mean tools.search.top_k?"),
        ("  lr: 1e-5", "  kv_cache_gib: 2", 11, "optim.kv_cache_gib", "elsewhere: engine.kv_cache_gib"),
        ("  steps: 10", "  steps: 10\n  lr: 1", 16, "run.lr", "lr belongs elsewhere: optim.lr"),
        ("  kind: hf", "  kind: hf\n  zzzzqq: 1", 7, "engine.zzzzqq", "valid keys here: kind, deterministic"),
        ("run:", "agents:\n a:\n  sampling:\n   temprature: 1\nrun:", 17, "agents.a.sampling.temprature", "ature?"),
    ],
)  # fmt: skip
def test_unknown_key_at_each_depth_names_line_value_and_the_nearest_key(recipe, before, after, line, key, hint):
    cause, fix = only(recipe, GOOD.replace(before, after))
    assert cause.startswith(f"x.yaml:{line}: {key}: unknown key (given ")
    assert hint in fix


def test_all_faults_are_listed_first_line_first(recipe):
    text = GOOD.replace("kind: hf", "kind: vlm").replace("1e-5", "-1").replace("  steps: 10", "  seed: x")
    found = problems(recipe, text)
    assert [cause.split(": ")[0] for cause, _ in found] == ["x.yaml:6", "x.yaml:11", "x.yaml:14", "x.yaml:15"]
    assert found[0] == (
        'x.yaml:6: engine.kind: got "vlm", expected one of scripted, hf, vllm',
        "did you mean kind: vllm?",
    )
    assert found[1][0] == "x.yaml:11: optim.lr: got -1, expected a number of at least 0"
    assert found[2] == (
        "x.yaml:14: run.steps: a required key is missing",
        "add run.steps: a whole number of at least 0",
    )


def test_keys_of_a_missing_required_section_are_named(recipe):
    cause, fix = only(recipe, GOOD.replace("run:\n  steps: 10\n", ""))
    assert "run.steps: a required key is missing" in cause
    assert fix == "add run.steps: a whole number of at least 0"


@pytest.mark.parametrize(
    ("override", "expected", "hint"),
    [
        ('run.steps="10"', 'got "10", expected a whole number', "drop the quotes and leading zeros: write steps: 10"),
        ("run.steps=010", 'got "010", expected a whole number', "drop the quotes and leading zeros: write steps: 10"),
        ('optim.lr="1e-5"', 'got "1e-5", expected a number', "write lr: 1e-05"),
        ("run.steps=1e3", "got 1000.0, expected a whole number", "write it in whole digits: steps: 1000"),
        ("run.steps=true", "got true, expected a whole number", "set run.steps to a whole number"),
        ("run.keep_best=no", 'got "no", expected true or false', "write keep_best: false"),
        ("run.keep_best=1", "got 1, expected true or false", "set run.keep_best to true or false"),
        ("run.name=2024", "got 2024, expected text, or null", 'put it in quotes: name: "2024"'),
        ("toy.weights=3", "got 3, expected a list, each item a number", "write a list: weights: [3]"),
        ("toy.weights=[1, x]", 'toy.weights.1: got "x", expected a number', "set toy.weights.1 to a number"),
        ("toy.rounds=10", "got 10, expected a whole number of at least 1 and of at most 9", "set toy.rounds"),
        ("optim=3", "got 3, expected a section with the keys lr, betas", "set optim to a section"),
        ("optim.lr=", "got null, expected a number", "set optim.lr to a number"),
        ("optim.lr={a: 1}", "got a mapping with the keys a, expected a number", "set optim.lr"),
        ("optim.betas=[0.9]", "a list of 2 items", "optim.betas"),
        ("optim.betas=[0.9, 1.0]", "got 1.0, expected a number of at least 0 and below 1", "set optim.betas.1 to"),
        ("optim.betas=[-0.1, 0.9]", "got -0.1, expected a number of at least 0 and below 1", "set optim.betas.0 to"),
        ("optim.lr=nan", 'got "nan", expected a number', "set optim.lr to a number of at least 0"),
        ("run.name=a/b", "'a/b' is not a folder name", "plain folder name"),
        ('run.name="a\\nb"', "cannot be shown", "plain folder name"),
        ('run.name="a\\e[31mb"', "cannot be shown", "plain folder name"),
        ("run.name=..", "'..' is not a folder name", "plain folder name"),
        (f"run.name={'x' * 201}", "201 characters are too many", "plain folder name"),
        ("algorithm.kl_estimator=k2", "has no effect with kl_coef 0", "set kl_coef too"),
        ("optim.min_lr_ratio=0.1", "has no effect with schedule: constant", "linear or cosine"),
        ("launch.address=10.0.0.1:6379", "has no effect with engine.kind: hf", "leave it out"),
    ],
)
def test_wrong_type_names_value_expectation_and_fix(recipe, override, expected, hint):
    cause, fix = only(recipe, GOOD, override)
    assert cause.startswith(f"--set {override.split('=')[0]}: ")
    assert expected in cause
    assert hint in fix


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps", "\"run.steps\" has no '='"),
        ("=3", 'is no dotted key'),
        ("run..steps=3", "is no dotted key"),
        ("run.steps.x=1", "run.steps is a single value (10), not a section"),
        ("optim.eps.x=1", "optim.eps is a single value, not a section"),
        ("toy.weights.0=1", "toy.weights is a list"),
        ("method=mars", "the method is fixed"),
        ("run.steps=[1", "not valid YAML"),
        ("run.stepz=1", "unknown key (given 1)"),
        ("optim.lr=.inf", "expected a finite number"),
        ("toy.note=!!python/object:os.system x", "tags such as"),
    ],
)  # fmt: skip
def test_faulty_overrides_are_refused(recipe, override, expected):
    cause, fix = only(recipe, GOOD, override)
    assert expected in cause
    assert fix


def test_every_faulty_override_is_listed(recipe):
    assert len(problems(recipe, GOOD, "a", "b", "run.steps.x=2")) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "a list, expected a mapping"),
        ("hello", 'the single value "hello", expected a mapping'),
        ("{}", "holds no keys"),
        ("model: {name: x}\nmethod: toy\n", 'the first key is "model", expected method (it stands on line 2)'),
        ("model: {name: x}\n", "(it is missing)"),
        ("method: 3\n", "x.yaml:1: method: got 3"),
        ("method: toyz\n", "x.yaml:1: method: unknown method 'toyz'"),
        ("method: toy\nrun:\n\tsteps: 1\n", "x.yaml:3: a tab where YAML wants spaces"),
        ("method: toy\nrun:\n  steps: 1\n  steps: 2\n", "x.yaml:4: run.steps: given twice (first on line 3)"),
        ("method: toy\nrun: {steps: 1\n", "not valid YAML"),
        ("method: toy\n---\nmethod: toy\n", "more than one YAML document"),
        ("method: toy\nrun: &r {steps: 1}\nx:\n  <<: *r\n", "x.yaml:4: x: merge keys"),
        ("method: toy\nrun: !!python/object:os.system x\n", "x.yaml:2: run: tags such as"),
        ("method: toy\na: &a [*a]\n", "aliases that repeat themselves"),
        ("method: toy\na: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("method: toy\nrun: {steps: " + "9" * 6000 + "}", "too many digits"),
        ("method: toy\nrun:\n  name: \x01\n", "x.yaml:3: a character that YAML does not allow"),
        ('method: toy\nrun:\n  name: "\\ud800"\n', "half of a surrogate pair"),
        ("method: toy\n? [a]\n: 1\n", "a key that is a list or a mapping"),
        ("method: toy\nrun: {steps: 1e999}\n", "expected a finite number"),
    ],
)
def test_files_that_are_no_recipe_are_refused_with_their_line(recipe, text, expected):
    cause, fix = only(recipe, text)
    assert cause.startswith("x.yaml")
    assert expected in cause
    assert fix


def test_alias_bomb_is_refused_quickly(recipe):
    levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 9))
    cause, _ = only(recipe, f"method: toy\nl0: &l0 [x]\n{levels}\n")
    assert "aliases" in cause


def test_huge_and_non_utf8_files_are_refused(recipe):
    assert "too long for a recipe" in only(recipe, b"#" * (MAX_BYTES + 1))[0]
    assert only(recipe, b"method: toy\nrun:\n  name: caf\xe9\n")[0] == "x.yaml:3: not UTF-8 text (byte 0xe9)"


def test_byte_order_mark_and_windows_lines_are_read(recipe):
    loaded = recipe(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert loaded.origins["run.steps"] == "x.yaml:15"


@pytest.mark.parametrize("key", ["engine.api_key", "engine.token", "toy.note"])
def test_secrets_are_refused_and_never_repeated(recipe, key):
    secret = "sk-abcdefghijklmnop"
    section, leaf = key.split(".")
    text = GOOD.replace(f"{section}:\n", f"{section}:\n  {leaf}: {secret}\n")
    for args in ((text,), (GOOD, f"{key}={secret}")):
        cause, fix = only(recipe, *args)
        assert secret not in cause + fix
        assert "environment variable" in fix


def test_a_validators_words_become_cause_and_fix_at_the_key_they_name(recipe):
    cause, fix = only(recipe, GOOD.replace("engine:\n", "engine:\n  kv_cache_gib: 2\n"))
    assert "engine.kv_cache_gib: kv_cache_gib has no effect with kind: hf" in cause
    assert fix == "it belongs to vllm"
    agents = "agents:\n  a:\n    policy: nobody\n"
    cause, fix = only(recipe, GOOD + agents)
    assert "`policies:` for several" in fix


def test_missing_file_names_the_nearest_shipped_recipe(recipe, tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    (shipped / "smoke").mkdir(parents=True)
    (shipped / "smoke" / "toy.yaml").write_text(GOOD)
    (shipped / "hle.yaml").write_text(GOOD)
    monkeypatch.setattr("agentrl.config.shipped.shipped_folder", lambda: shipped)
    for name in ("recipes/hle.yaml", "hle.yaml", "hle", "smoke/toy", "recipes/smoke/toy.yaml", "./recipes/hle.yaml"):
        assert load(name, toy_schema).tree.method == "toy"
    with pytest.raises(ConfigError, match="no such file") as caught:
        load("recipes/hlee.yaml", toy_schema)
    assert caught.value.fix == "did you mean hle?"
    with pytest.raises(ConfigError, match="a folder") as caught:
        load(str(shipped), toy_schema)
    for odd in ("x" * 5000, "a\0b", "../hle"):
        with pytest.raises(ConfigError, match="no such file"):
            load(odd, toy_schema)
    Path("hle").write_text(GOOD.replace("steps: 10", "steps: 77"))
    assert load("hle", toy_schema).tree.run.steps == 77  # a path wins over a shipped name


def test_a_method_without_smoke_form_says_so(recipe, monkeypatch):
    monkeypatch.delattr(ToyRecipe, "smoke")
    with pytest.raises(ConfigError, match="no smoke form"):
        recipe(GOOD, smoke=True)


def test_a_recipes_own_smoke_section_is_merged_over_the_methods_and_counts_only_then(recipe) -> None:
    text = GOOD + "smoke:\n  run: {seed: 7, steps: 3}\n  toy:\n    note: small\n"
    whole = recipe(text)
    assert (whole.tree.run.steps, whole.tree.run.seed, whole.tree.toy.note) == (10, 0, "")
    small = recipe(text, smoke=True)
    assert (small.tree.run.steps, small.tree.run.seed, small.tree.toy.note) == (3, 7, "small")
    assert small.tree.toy.weights == (5.0,)
    assert small.origins["toy.note"] == f"x.yaml:{len(GOOD.splitlines()) + 4}"
    assert recipe(text, "run.steps=4", smoke=True).tree.run.steps == 4
    assert "smoke" not in dump_yaml(small.tree)


@pytest.mark.parametrize(
    ("section", "fault"),
    [("smoke: 3\n", "smoke: got 3, expected a mapping"), ("smoke:\n  toy:\n    rounds: 99\n", "toy.rounds: got 99")],
)
def test_a_fault_in_a_smoke_section_is_told_with_its_line(recipe, section: str, fault: str) -> None:
    with pytest.raises(RecipeError, match=fault) as caught:
        recipe(GOOD + section, smoke=True)
    assert f"x.yaml:{len(GOOD.splitlines()) + len(section.splitlines())}" in str(caught.value)
