"""Tiny models with random weights, for tests and first tries: four architectures, made in milliseconds.

A name is `tiny-<architecture>[-h<hidden size>][-s<seed>]`: `tiny-llama`, `tiny-qwen3-h128`, `tiny-gemma3-h96-s7`.
Numpy and `tokenizers` only, so that naming one loads neither torch nor transformers. llama, gemma3 and gpt2 tie their
embeddings, qwen3 does not; gemma3 has one sliding-window layer; gpt2 has absolute positions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt2")
# Part of the cached folder's name: raise it when what is written below changes.
FORMAT = 1
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Added but not special, as in Qwen: `skip_special_tokens` keeps them, text from the world must not become them.
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What the byte-pair merges are learnt from: text like the prompts and answers of the tests.
_MERGE_TEXT = (
    "The capital of France is Paris. What is the answer to the question? Search the documents and answer in one word. "
    "You are a helpful assistant. Use the tool to search, read the results, then give the final answer. "
    "Question: how many apples does she have left? Answer: 12 apples. "
    '{"name": "search", "arguments": {"query": "the river of the north", "purpose": "find the name"}} '
    "def solve(x): return x + 1  # python code prints the result 0 1 2 3 4 5 6 7 8 9 10 100 "
    "system user assistant tool response think and therefore because that this with from which have been were "
)
_LAYERS = 2
_HEAD_DIM = 32
_NAME = re.compile(rf"tiny-({'|'.join(ARCHITECTURES)})(?:-h([1-9]\d*))?(?:-s(0|[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class TinySpec:
    architecture: str
    hidden: int = 64
    seed: int = 0


def parse(name: str) -> TinySpec | None:
    """The spec of a tiny model's name, None for any other name. Raises `ConfigError` on a bad hidden size."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    spec = TinySpec(match[1], int(match[2] or 64), int(match[3] or 0))
    if spec.hidden % _HEAD_DIM or not 32 <= spec.hidden <= 1024:
        raise ConfigError(
            f"{name}: hidden size {spec.hidden} is not a multiple of {_HEAD_DIM} from 32 to 1024",
            f"use tiny-{spec.architecture}-h64 or tiny-{spec.architecture}-h128",
        )
    return spec


def make(spec: TinySpec, dest: Path) -> None:
    """Write config, weights (float32 safetensors), tokenizer and chat template into the existing folder `dest`."""
    import numpy as np
    from safetensors.numpy import save_file

    tokenizer = make_tokenizer()
    config = _config(spec, tokenizer.get_vocab_size())
    rng = np.random.default_rng(spec.seed)
    tensors = {
        name: np.full(shape, scale, np.float32)
        if kind == "fill"
        else (rng.standard_normal(shape) * scale).astype(np.float32)
        for name, (kind, scale, shape) in _parameters(spec, config).items()
    }
    save_file(tensors, dest / "model.safetensors", metadata={"format": "pt"})
    _write_json(dest / "config.json", config)
    _write_json(dest / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0})
    tokenizer.save(str(dest / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings", config.get("n_positions")),
    }
    _write_json(dest / "tokenizer_config.json", tokenizer_config)
    (dest / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE: three special tokens (ids 0 to 2), 256 bytes, merges, and six added tokens at the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(ADDED_TOKENS),
        show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([_MERGE_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED_TOKENS])
    return tokenizer


def _config(spec: TinySpec, vocab_size: int) -> dict[str, Any]:
    tokens = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32"}
    if spec.architecture == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": 1024,
            "n_embd": spec.hidden,
            "n_layer": _LAYERS,
            "n_head": spec.hidden // _HEAD_DIM,
            # A policy is compared with itself: dropout in train mode would move its log-probabilities.
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0),
            "tie_word_embeddings": True,
            **tokens,
        }
    heads = spec.hidden // _HEAD_DIM
    config: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2) if heads % 2 == 0 else heads,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": spec.architecture != "qwen3",
        **tokens,
    }
    if spec.architecture == "llama":
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}
    if spec.architecture == "qwen3":
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **config}
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": _HEAD_DIM,
        **config,
    }


_Init = tuple[str, float, tuple[int, ...]]


def _normal(*shape: int, fan_in: int) -> _Init:
    # 1/sqrt(fan_in), not the usual 0.02: attention then moves the logits enough for a leak or a wrong mask to show.
    return ("normal", 1.0 / math.sqrt(fan_in), shape)


def _fill(value: float, *shape: int) -> _Init:
    return ("fill", value, shape)


def _parameters(spec: TinySpec, config: Mapping[str, Any]) -> dict[str, _Init]:
    """Checkpoint name -> how the parameter is drawn, in a fixed order (the order of the random numbers)."""
    return _gpt2_parameters(config) if spec.architecture == "gpt2" else _llama_like_parameters(spec, config)


def _llama_like_parameters(spec: TinySpec, config: Mapping[str, Any]) -> dict[str, _Init]:
    h, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * _HEAD_DIM, config["num_key_value_heads"] * _HEAD_DIM
    gemma = spec.architecture == "gemma3"
    unit = 0.0 if gemma else 1.0  # Gemma's norms multiply by 1 + weight
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
    out: dict[str, _Init] = {"model.embed_tokens.weight": _normal(vocab, h, fan_in=h)}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        out |= {f"{at}{norm}.weight": _fill(unit, h) for norm in norms}
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            out[f"{at}self_attn.{name}.weight"] = _normal(rows, h, fan_in=h)
        out[f"{at}self_attn.o_proj.weight"] = _normal(h, q, fan_in=q)
        if spec.architecture in ("qwen3", "gemma3"):
            out |= {f"{at}self_attn.{name}.weight": _fill(unit, _HEAD_DIM) for name in ("q_norm", "k_norm")}
        out |= {f"{at}mlp.{name}.weight": _normal(inner, h, fan_in=h) for name in ("gate_proj", "up_proj")}
        out[f"{at}mlp.down_proj.weight"] = _normal(h, inner, fan_in=inner)
    out["model.norm.weight"] = _fill(unit, h)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = _normal(vocab, h, fan_in=h)
    return out


def _gpt2_parameters(config: Mapping[str, Any]) -> dict[str, _Init]:
    h, vocab = config["n_embd"], config["vocab_size"]
    out = {
        "transformer.wte.weight": _normal(vocab, h, fan_in=h),
        "transformer.wpe.weight": _normal(config["n_positions"], h, fan_in=h),
    }
    # GPT-2's linear weights are stored as (in, out).
    linears = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "mlp.c_fc": (h, 4 * h), "mlp.c_proj": (4 * h, h)}
    norms = [f"h.{layer}.{name}" for layer in range(_LAYERS) for name in ("ln_1", "ln_2")] + ["ln_f"]
    for norm in norms:
        out |= {f"transformer.{norm}.weight": _fill(1.0, h), f"transformer.{norm}.bias": _fill(0.0, h)}
    for layer in range(_LAYERS):
        for name, (rows, columns) in linears.items():
            out[f"transformer.h.{layer}.{name}.weight"] = _normal(rows, columns, fan_in=rows)
            out[f"transformer.h.{layer}.{name}.bias"] = _fill(0.0, columns)
    return out


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
