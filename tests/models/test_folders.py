"""Folders are written with ties kept and read without pickles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.errors import MissingError
from agentrl.models import count_parameters, load_model, load_tokenizer, save_hf_folder, tiny, weight_files
from agentrl.models.tiny import TinySpec


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    tiny.make(TinySpec("llama"), folder)
    return folder


IDS = torch.arange(20, 40)[None]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_saved_folder_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tiny.make(TinySpec(architecture), tmp_path / "a")
    model = load_model(tmp_path / "a", "float32")
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    save_hf_folder(model, load_tokenizer(tmp_path / "a"), tmp_path / "b")
    again = load_model(tmp_path / "b", "float32")
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, again(input_ids=IDS).logits)
    assert load_tokenizer(tmp_path / "b").chat_template == tiny.CHAT_TEMPLATE
    assert count_parameters(tmp_path / "b") == count_parameters(tmp_path / "a")


def test_tied_embeddings_are_stored_once_and_tied_again(llama: Path, tmp_path: Path) -> None:
    model = load_model(llama, "float32")
    save_hf_folder(model, None, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    again = load_model(tmp_path / "out", "float32")
    before = again(input_ids=IDS).logits
    with torch.no_grad():
        again.get_input_embeddings().weight[300] += 1.0
    assert not torch.equal(before[..., 300], again(input_ids=IDS).logits[..., 300])


def test_an_untied_copy_of_the_head_with_its_own_values_is_not_dropped(llama: Path, tmp_path: Path) -> None:
    model = load_model(llama, "float32")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        save_hf_folder(model, None, tmp_path / "out")


def test_dtype_is_as_asked(llama: Path) -> None:
    assert load_model(llama, "bfloat16").dtype == torch.bfloat16
    assert load_model(llama, "float32").dtype == torch.float32


def test_a_folder_with_pickled_weights_is_refused(llama: Path) -> None:
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    with pytest.raises(MissingError, match="pickled"):
        load_model(llama)


def test_a_missing_weight_is_an_error_and_not_a_random_number(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(llama)


def test_a_truncated_file_is_seen_without_loading_it(llama: Path) -> None:
    raw = (llama / "model.safetensors").read_bytes()
    for cut in (raw[:-1], raw[:100], b"", b"\xff" * 64):
        (llama / "model.safetensors").write_bytes(cut)
        with pytest.raises(MissingError, match="cut short"):
            count_parameters(llama)


def test_shards_are_counted_and_an_absent_one_is_named(llama: Path) -> None:
    total = count_parameters(llama)
    tensors = load_file(llama / "model.safetensors")
    names = sorted(tensors)
    (llama / "model.safetensors").unlink()
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, llama / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(llama)] == list(shards)
    assert count_parameters(llama) == total
    (llama / "model-2.safetensors").unlink()
    with pytest.raises(MissingError, match=r"model-2\.safetensors"):
        weight_files(llama)


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no config\.json"):
        weight_files(tmp_path)
