"""Small tokenizers of the kinds that chat models use, and model folders that pair them with template fixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentrl.chat.format import ChatFormat

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
SPECIAL = [
    *("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "ing"]
LINES = [
    "The capital of France is Paris, and the river running through it is the Seine.",
    "user assistant system model tool You are a helpful assistant. Search for the thing that I am asking.",
    'im_start im_end {"name": "search", "arguments": {"query": ["x"]}, "purpose": "why"}',
    "\n\n### Instruction:\nnothing interesting\n\n### Response:\n",
] * 4


def _added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2 style; its special tokens stand in the model's vocabulary too, as SmolLM2's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return _added(tokenizer)


def whole_words() -> Tokenizer:
    """Takes a word from the vocabulary before any merge (as Llama 3 does), and hardly splits into words."""
    spec = json.loads(byte_level().to_str())
    spec["model"]["ignore_merges"] = True
    spec["model"]["vocab"] |= {t["content"]: t["id"] for t in spec["added_tokens"]}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def prepending() -> Tokenizer:
    """Llama 2 style: a space is prepended to every stretch, byte fallback, an unknown token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    spec["model"] |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _added(tokenizer)


def unigram() -> Tokenizer:
    """T5 style: unigram pieces, metaspace, no byte fallback; the special tokens are pieces of the model."""
    letters = sorted({c for line in LINES for c in line.replace(" ", "▁")} | set("<>|_/[]<>\n0123456789"))
    words = ["▁the", "▁capital", "ing", "er", "▁is", "▁of", "Paris"]
    pieces = [(t, 0.0) for t in SPECIAL] + [(w, -3.0) for w in words] + [(c, -5.0) for c in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    return _added(tokenizer)


TOKENIZERS = {f.__name__: f for f in (byte_level, whole_words, prepending, unigram)}
ENDS = {
    "chatml": "<|im_end|>",
    "thinking": "<|im_end|>",
    "newline_between": "<|im_end|>",
    "headers": "<|eot_id|>",
    "inst": "</s>",
    "model_turns": "<end_of_turn>",
    "plain_marker": "</s>",
}

MakeFolder = Callable[..., Path]
MakeFormat = Callable[..., ChatFormat]


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """(template, tokenizer, eos of the generation config, pad) -> a folder as a hub model has it, without weights."""
    built = {name: build() for name, build in TOKENIZERS.items()}

    def make(
        template: str, tokenizer: str = "byte_level", eos: list[str] | None = None, pad: str | None = None
    ) -> Path:
        folder = tmp_path_factory.mktemp(f"{template}-{tokenizer}")
        built[tokenizer].save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": ENDS[template],
            "unk_token": "<unk>",
            "pad_token": pad,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{template}.jinja").read_text("utf-8"))
        if eos is not None:
            ids = [built[tokenizer].token_to_id(t) for t in eos]
            value = ids[0] if len(ids) == 1 else ids
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        return folder

    return make


@pytest.fixture(scope="session")
def make_format(make_folder: MakeFolder) -> MakeFormat:
    def make(*args: object, **kwargs: object) -> ChatFormat:
        return ChatFormat.from_folder(make_folder(*args, **kwargs))

    return make


@pytest.fixture(scope="session", params=sorted(TOKENIZERS))
def any_tokenizer(request: pytest.FixtureRequest, make_format: MakeFormat) -> ChatFormat:
    """One format per kind of tokenizer."""
    return make_format("chatml", request.param)


@pytest.fixture(params=sorted(ENDS))
def template_name(request: pytest.FixtureRequest) -> str:
    return request.param
