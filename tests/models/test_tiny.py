"""Tiny models: made without torch, the same every time, and just what transformers expects."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.models import TINY_NAMES, count_parameters, load_model, load_tokenizer, tiny
from agentrl.models.tiny import TinySpec


@pytest.fixture(scope="module", params=[*TINY_NAMES, "tiny-llama-h96-s3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp(request.param)
    spec = tiny.parse(request.param)
    assert spec is not None
    tiny.make(spec, dest)
    return dest


def test_every_weight_is_used_and_none_is_missing(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert count_parameters(folder) == sum(p.numel() for p in model.parameters())


def test_tokens_round_trip_and_the_chat_template_is_chatml(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "What is the naïve answer 42?\n\t{\"x\": '日本'} <b>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == expected
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token_id == 2
    assert len(tokenizer) == load_model(folder, "float32").config.vocab_size


def test_added_tokens_are_one_id_each_and_not_special(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for token in tiny.ADDED_TOKENS:
        ids = tokenizer(token).input_ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == token


def test_logits_depend_on_the_past_and_are_neither_flat_nor_certain(folder: Path) -> None:
    model = load_model(folder, "float32")
    ids = torch.arange(20, 60)[None]
    other = ids.clone()
    other[0, 0] = 100
    with torch.no_grad():
        logprobs, moved = (model(input_ids=x).logits[0].log_softmax(-1) for x in (ids, other))
    assert (logprobs - moved)[-1].abs().max() > 1e-3
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert 2.0 < entropy.min() < entropy.mean() < 6.2 - 0.1


def test_train_mode_has_no_dropout(folder: Path) -> None:
    model = load_model(folder, "float32")
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model.train()(input_ids=ids).logits)


def _digest(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def test_the_same_name_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    digests = []
    for i, seed in enumerate((0, 0, 1)):
        dest = tmp_path / str(i)
        dest.mkdir()
        tiny.make(TinySpec("qwen3", 64, seed), dest)
        digests.append(_digest(dest))
    assert digests[0] == digests[1] != digests[2]


def test_names_carry_size_and_seed() -> None:
    assert tiny.parse("tiny-gemma3-h128-s7") == TinySpec("gemma3", 128, 7)
    assert tiny.parse("tiny-gpt2-s2") == TinySpec("gpt2", 64, 2)
    assert tiny.parse("tiny-mamba") is None
    with pytest.raises(ConfigError, match="hidden size 100"):
        tiny.parse("tiny-llama-h100")


def test_making_one_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from agentrl.models import resolve; resolve('tiny-llama'); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"AGENTRL_HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
