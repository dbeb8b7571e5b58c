"""Bad input of RecursiveMAS through the command line: one line of cause with names and sizes, one of fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.models import resolve
from agentrl.recipes.recursivemas.links import new_links, save_links
from agentrl.recipes.recursivemas.setup import load_system
from agentrl.recipes.registry import load_recipe
from agentrl.update.link_header import read_metadata

PAIR = """\
method: recursivemas
policies:
  expert: {name: tiny-gpt2-h96, mode: frozen, dtype: float32}
  learner: {name: tiny-llama, mode: frozen, dtype: float32}
engine: {kind: hf, deterministic: true}
recursivemas: {style: distillation, answer: short, rounds: 2, latent_steps: 3}
agents: {learner: {sampling: {temperature: 0.0, max_tokens: 4}}}
launch: {gpus: 0, threads: 1}
run: {steps: 1}
"""
ASK = ("recursivemas", "infer", "pair.yaml", "--question", "What is it?")


@pytest.fixture
def pair(folder: Path) -> Path:
    (folder / "pair.yaml").write_text(PAIR)
    for name in ("tiny-gpt2-h96", "tiny-llama"):
        resolve(name)  # check looks into models that are there
    return folder


@pytest.fixture
def links(pair: Path) -> Path:
    """Links of the pair that say they were trained."""
    recipe = load_recipe("pair.yaml").tree
    system = load_system(recipe, allow_untrained=True).system
    backbones = {name: agent.backbone for name, agent in system.agents.items()}
    made = new_links(recipe.recursivemas, backbones, 0)
    save_links(made.after(made.by_name, {"stage": "outer"}), pair / "links")
    return pair / "links"


def _rewrite(path: Path, change) -> None:
    metadata = {key: json.dumps(value) for key, value in read_metadata(path).items()}
    save_file(change(load_file(path)), path, metadata)


@pytest.mark.parametrize(
    ("sets", "code", "cause", "fix"),
    [
        (["recursivemas.rounds=0"], 2, "recursivemas.rounds: got 0", ""),
        (["recursivemas.rounds=99999999999999999999"], 2, "recursivemas.rounds: got 99999999999999999999", ""),
        (["recursivemas.style=parliament"], 2, "recursivemas.style", "distillation"),
        (["recursivemas.latent_steps=5000"], 2, "positions of agent expert in round 1", "lower it"),
        (["recursivemas.roles={learner: {prompt: '{question}'}}"], 2, "the slot {expert} is missing", ""),
        (
            ["recursivemas.roles={learner: {prompt: '{expert} {judge}'}}"],
            2,
            "{judge} is no block that learner hears",
            "",
        ),
        (["recursivemas.links=nowhere"], 3, "there is no folder or run 'nowhere' with links", "a run"),
        (["policies.expert.name=nobody/nothing"], 3, "'nobody/nothing' is neither a folder here nor", "hf download"),
        (["launch.gpus=2"], 3, "launch.gpus is 2, but this process sees no GPU", "launch.gpus: 0"),
        (["reward=nothing"], 2, "reward: 'nothing' is neither math", "module:function"),
        ([], 2, "no trained links are named, and untrained links carry nothing", "--allow-untrained"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_loads(cli, pair, sets, code, cause, fix, monkeypatch):
    monkeypatch.setattr("agentrl.recipes.recursivemas.setup.load_hf_policy", lambda *a: pytest.fail("a model loaded"))
    cli(*ASK, sets=tuple(sets)).two_lines(code, cause, fix)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        ({"stage": "both"}, "inner_steps: is needed with stage: both"),
        ({"stage": "inner", "form": "first_step"}, "form: has no effect with stage: inner"),
        ({"stage": "outer", "mse_weight": 0.1}, "mse_weight: has no effect with stage: outer"),
        ({"round_weights": [1.0]}, "train.round_weights: 1 weights for 2 rounds"),
        ({"targets": {"expert": "plan"}}, "targets: has no effect with form: rollout"),
        ({"form": "teacher_forced", "micro_batch": 4}, "micro_batch: teacher_forced takes one question at a time"),
        ({"form": "teacher_forced", "targets": {"learner": "x"}}, "train.targets.learner: the decoder's known text is"),
        ({"template": "42"}, "template: it must hold {answer} once"),
    ],
)
def test_a_training_setting_without_effect_is_refused(cli, pair, own, cause):
    sets = (f"recursivemas.train={json.dumps(own)}", "data.path=invented")
    cli("recursivemas", "train", "pair.yaml", sets=sets).two_lines(2, cause)


@pytest.mark.parametrize(
    ("sets", "code", "cause"),
    [
        (["run.steps=0"], 2, "run.steps: 0, so nothing would be trained"),
        (["recursivemas.latent_steps=0"], 2, "no gradient reaches an outer link"),
        (["recursivemas.train={stage: both, inner_steps: 1}"], 2, "all of them are among the 1 inner ones"),
        (["recursivemas.train={form: teacher_forced}"], 4, "teacher_forced reads a known text of expert"),
        (["recursivemas.train={stage: inner, targets: {expert: plan}}"], 4, "have no text in column 'plan'"),
        (["recursivemas.train.batch=721"], 4, "720 tasks, fewer than recursivemas.train.batch (721)"),
        (["recursivemas.train={leak_probe: true}"], 4, "the leak probe measures on a held-out set"),
        (["data.eval={path: invented}"], 4, "of its 720 questions are trained on too"),
    ],
)
def test_a_run_that_would_train_nothing_or_on_nothing_is_refused(cli, pair, sets, code, cause):
    cli("recursivemas", "train", "pair.yaml", sets=("data.path=invented", *sets)).two_lines(code, cause)


def test_links_of_other_models_are_refused_by_name_before_anything_loads(cli, links, monkeypatch):
    monkeypatch.setattr("agentrl.recipes.recursivemas.setup.load_hf_policy", lambda *a: pytest.fail("a model loaded"))
    other = cli(*ASK, "--links", "links", sets=("policies.learner.name=tiny-qwen3",))
    other.two_lines(2, "was made with source 'tiny-llama', here it is 'tiny-qwen3'", "or train them")
    form = cli(*ASK, "--links", "links", sets=("recursivemas.outer_form=paper",))
    form.two_lines(2, "was made with form 'ln_res', here it is 'paper'", "forms")
    (links / "inner-expert.safetensors").unlink()
    cli(*ASK, "--links", "links").two_lines(3, "there is no link file links/inner-expert.safetensors", "train")


def test_a_link_file_with_other_keys_or_numbers_is_refused_by_its_path(cli, links):
    path = links / "outer-expert-learner.safetensors"
    _rewrite(path, lambda state: {k: v for k, v in state.items() if k != "proj1.bias"} | {"proj3.bias": torch.zeros(1)})
    done = cli(*ASK, "--links", "links")
    done.two_lines(
        4, "lacks proj1.bias and has also proj3.bias: not an outer link from tiny-gpt2-h96 (96) to tiny-llama"
    )
    _rewrite(path, lambda state: {k: v for k, v in state.items() if k != "proj3.bias"} | {"proj1.bias": torch.ones(3)})
    cli(*ASK, "--links", "links").two_lines(4, "proj1.bias is (3,)", "this pair of models")
    _rewrite(path, lambda state: state | {"proj1.bias": torch.full((128,), float("nan"))})
    cli(*ASK, "--links", "links").two_lines(4, "no finite numbers", "again")
    path.write_bytes(path.read_bytes()[:300])
    done = cli(*ASK, "--links", "links")
    assert done.code in (2, 4)
    assert "outer-expert-learner.safetensors is cut short" in done.err


def test_a_pickle_that_is_not_plain_tensors_is_never_opened(cli, pair):
    import pickle

    class Evil:
        def __reduce__(self):
            return Path.touch, (Path("opened"),)

    for name in ("expert", "learner"):
        (pair / name).mkdir()
        (pair / name / "adapter.pt").write_bytes(pickle.dumps(Evil()))
    entries = [
        {"legacy_key": key, "filename": "o.pt", "in_dim": i, "out_dim": o}
        for key, i, o in (("el", 96, 64), ("le", 64, 96))
    ]
    (pair / "outerlink_config.json").write_text(json.dumps({"adapters": entries}))
    official = "recursivemas.official={outer: ., inner: {expert: expert, learner: learner}}"
    cli(*ASK, sets=(official,)).two_lines(4, "expert/adapter.pt is no plain state dict of tensors", "never opened")
    assert not Path("opened").exists()
    swapped = [{**e, "in_dim": e["out_dim"], "out_dim": e["in_dim"]} for e in entries]
    (pair / "outerlink_config.json").write_text(json.dumps({"adapters": swapped}))
    cli(*ASK, sets=(official,)).two_lines(4, "maps 64 to 96; an outer link from tiny-gpt2-h96 (96) to tiny-llama (64)")


def test_latents_that_are_no_numbers_end_the_run_with_their_slot(cli, links):
    path = links / "outer-expert-learner.safetensors"
    huge = {"residual_proj.weight": torch.full((64, 96), 3e38), "residual_proj.bias": torch.full((64,), 3e38)}
    _rewrite(path, lambda state: state | huge)
    done = cli(*ASK, "--links", "links")
    done.two_lines(1, "the latent block of slot 1 ((3, 64)) holds NaN or infinity", "lower optim.lr")


def test_a_question_longer_than_the_window_is_named_with_the_sizes(cli, links, pair):
    rows = [{"id": "short", "question": "Why?"}, {"id": "long", "question": "apples " * 1200}]
    (pair / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli("recursivemas", "infer", "pair.yaml", "--links", "links", "--input", "questions.jsonl")
    done.two_lines(4, "question long: agent expert's prompt of", "shorten it")
    assert "the window of tiny-gpt2-h96 is 1024" in done.err


def test_untrained_links_are_announced_whenever_they_answer(cli, pair):
    done = cli(*ASK, "--allow-untrained")
    assert done.code == 0, done
    assert "the links are untrained: their answers mean nothing" in done.err
