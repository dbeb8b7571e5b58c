"""A policy on disk: the same to the bit, a plain model folder, and never a pickle."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DataError
from agentrl.update.checkpoint import load_policy, save_policy
from agentrl.update.step import update_policy

OPTIM = {"lr": 3e-3, "max_grad_norm": 1.0, "warmup_steps": 2, "schedule": "cosine"}


def _state(policy):
    state = {f"master.{n}": m for n, m in policy.masters.items()}
    state |= {f"compute.{n}": w for n, w in policy.compute_weights().items()}
    for n, m in policy.masters.items():
        state |= {f"{k}.{n}": v for k, v in policy.optimizer.state[m].items()}
    return {n: t.clone() for n, t in state.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(make_policy, family, tmp_path, arch, dtype):
    first = make_policy(arch, dtype=dtype, **OPTIM)
    for step in range(3):
        update_policy(first, family(6, seed=step), AlgorithmConfig())
    save_policy(first, tmp_path / "saved")
    second = make_policy(arch, dtype=dtype, **OPTIM)
    load_policy(second, tmp_path / "saved")
    assert (second.version, second.optimizer_steps) == (3, 3)
    for step in (3, 4):
        results = [update_policy(p, family(6, seed=step), AlgorithmConfig()) for p in (first, second)]
        assert results[0].metrics == results[1].metrics
    ours, theirs = _state(first), _state(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_a_policy_saved_before_its_first_step_resumes(make_policy, family, tmp_path):
    first, second = make_policy(**OPTIM), make_policy(**OPTIM)
    save_policy(first, tmp_path / "saved")
    update_policy(second, family(3), AlgorithmConfig())
    load_policy(second, tmp_path / "saved")
    for policy in (first, second):
        update_policy(policy, family(6), AlgorithmConfig())
    assert all(torch.equal(a, b) for a, b in zip(_state(first).values(), _state(second).values(), strict=True))


def test_broken_steps_are_counted_across_a_resume(make_policy, tmp_path):
    policy = make_policy()
    policy.grads["model.norm.weight"][0] = float("nan")
    policy.step()
    save_policy(policy, tmp_path / "saved")
    other = make_policy()
    load_policy(other, tmp_path / "saved")
    assert other.broken_steps == 1


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_the_folder_opens_with_transformers_and_gives_equal_logits(make_policy, family, tmp_path, arch):
    policy = make_policy(arch, **OPTIM)
    update_policy(policy, family(6), AlgorithmConfig())
    save_policy(policy, tmp_path / "saved")
    tied = policy.model.config.tie_word_embeddings
    assert tied == ("lm_head.weight" not in load_file(tmp_path / "saved/model.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, policy.model(ids).logits)
    if tied:
        assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert not list((tmp_path / "saved").glob("*.bin"))
    assert make_policy(arch, folder=tmp_path / "saved").layout == "tree"  # and trains on from there


@pytest.fixture
def saved(make_policy, family, tmp_path):
    policy = make_policy(**OPTIM)
    update_policy(policy, family(3), AlgorithmConfig())
    save_policy(policy, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(("arch", "word"), [("qwen3", "lm_head.weight"), ("gpt2", "model.embed_tokens.weight")])
def test_another_models_checkpoint_is_refused_by_name(make_policy, saved, arch, word):
    policy = make_policy(arch)
    before = {n: m.clone() for n, m in policy.masters.items()}
    with pytest.raises(DataError, match=word):
        load_policy(policy, saved)
    assert all(torch.equal(before[n], m) for n, m in policy.masters.items())


class _Evil:
    def __reduce__(self):
        return (open, ("pwned", "w"))


def _pickled(path):
    path.write_bytes(pickle.dumps(_Evil()))


def _truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def _other_shape(path):
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path)


def _one_less(path):
    tensors = load_file(path)
    del tensors[sorted(tensors)[-1]]
    save_file(tensors, path)


def _narrow(path):
    save_file({n: t.bfloat16() for n, t in load_file(path).items()}, path)


def _gone(path):
    path.unlink()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", [_pickled, _truncated, _other_shape, _one_less, _narrow, _gone])
def test_damaged_files_are_refused_before_anything_is_taken(make_policy, saved, monkeypatch, file, damage, tmp_path):
    monkeypatch.chdir(tmp_path)
    damage(saved / file)
    policy = make_policy(**OPTIM)
    before = {n: m.clone() for n, m in policy.masters.items()}
    with pytest.raises(DataError, match=file):
        load_policy(policy, saved)
    assert not (tmp_path / "pwned").exists()
    assert policy.version == 0
    assert all(torch.equal(before[n], m) for n, m in policy.masters.items())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 1, "optimizer_steps": -1, "broken_steps": 0}']
)
def test_odd_counters_are_refused(make_policy, saved, text):
    (saved / "policy.json").write_text(text, "utf-8")
    with pytest.raises(DataError, match=r"policy\.json"):
        load_policy(make_policy(), saved)


def test_weights_alone_are_no_checkpoint_to_resume_from(make_policy, tmp_path):
    policy = make_policy()
    save_policy(policy, tmp_path / "export", optimizer=False)
    assert {p.name for p in (tmp_path / "export").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    with pytest.raises(DataError, match=r"policy\.json"):
        load_policy(policy, tmp_path / "export")


def test_counters_are_plain_json(saved):
    assert json.loads((saved / "policy.json").read_text("utf-8")) == {
        "version": 1,
        "optimizer_steps": 1,
        "broken_steps": 0,
    }


def test_saving_into_a_folder_that_is_there_is_refused(make_policy, saved):
    with pytest.raises(FileExistsError):
        save_policy(make_policy(), saved)
