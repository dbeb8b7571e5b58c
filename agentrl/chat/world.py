"""Tokenizers made from a tokenizer: one for text from the world, and ones that continue a text.

Text from the world must not be able to write a control token. Switching special tokens off is not enough: some
tokenizers hold `<tool_call>` or `<think>` as added tokens that are not special, some list their added tokens in the
model's own vocabulary, and some take a whole word from the vocabulary before any merge. So the added tokens are
taken out of the serialized tokenizer everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

Spec = dict[str, Any]


def _without_prefix(part: Spec | None, decodes: bool = False) -> Spec | None:
    """A normalizer, a pre-tokenizer or (`decodes`) a decoder that neither adds nor strips the space before a text."""
    if part is None:
        return None
    kind = part["type"]
    if kind == "Prepend":
        return None
    if kind == "Sequence":
        key = next(k for k in ("normalizers", "pretokenizers", "decoders") if k in part)
        parts = [kept for p in part[key] if (kept := _without_prefix(p, decodes)) is not None]
        return {**part, key: parts} if parts else None
    if kind == "Metaspace":
        return {
            **part,
            "prepend_scheme": "never",
            **({"add_prefix_space": False} if "add_prefix_space" in part else {}),
        }
    if kind == "ByteLevel" and not decodes:  # as a decoder it strips nothing, whatever the flag says
        return {**part, "add_prefix_space": False}
    if kind == "Strip" and "content" in part:  # the decoder; the normalizer of this name has no content
        return {**part, "start": 0}
    return part


def _parts_without_prefix(spec: Spec) -> Spec:
    return {key: _without_prefix(spec.get(key), key == "decoder") for key in ("normalizer", "pre_tokenizer", "decoder")}


def _plain(spec: Spec) -> Spec:
    """A copy without truncation, padding, dropout and post-processor: ids depend on the text alone."""
    out = {**spec, "truncation": None, "padding": None, "post_processor": None}
    out["model"] = {**spec["model"], **({"dropout": None} if "dropout" in spec["model"] else {})}
    return out


def continuing(spec: Spec, start: Tokenizer) -> tuple[Tokenizer, bool]:
    """The tokenizer that takes up a text in the middle, and whether it encodes otherwise than `start`.

    Its decoder keeps a leading space, which a sentencepiece-like decoder would strip. `start` itself is returned
    where nothing is prepended or stripped.
    """
    parts = _parts_without_prefix(spec)
    if all(parts[key] == spec.get(key) for key in parts):
        return start, False
    differs = any(parts[key] != spec.get(key) for key in ("normalizer", "pre_tokenizer"))
    return Tokenizer.from_str(_dump({**_plain(spec), **parts})), differs


def starting(spec: Spec) -> Tokenizer:
    """The tokenizer for a text from its beginning."""
    return Tokenizer.from_str(_dump(_plain(spec)))


def without_added_tokens(spec: Spec, added: Mapping[int, str]) -> Tokenizer:
    """The tokenizer for text from the world: no id in `added` is in its reach, and nothing is prepended."""
    out = {**_plain(spec), **_parts_without_prefix(spec), "added_tokens": []}
    model = out["model"]
    if isinstance(model["vocab"], list):
        # Ids are places in the list, so a piece is renamed instead of removed: noncharacters stand in no text.
        model["vocab"] = list(model["vocab"])
        for index in added:
            if index < len(model["vocab"]):
                model["vocab"][index] = [f"\uffff\ufffe{index}\uffff", model["vocab"][index][1]]
    else:
        _remove_from_vocab(model, set(added))
    return Tokenizer.from_str(_dump(out))


def _remove_from_vocab(model: Spec, removed: set[int]) -> None:
    unknown = model.get("unk_token")
    if "merges" in model and model["vocab"].get(unknown) in removed:
        # Without an unknown token, characters outside the vocabulary are left out: better than a control token.
        model["unk_token"] = unknown = None
    vocab = {piece: i for piece, i in model["vocab"].items() if i not in removed or piece == unknown}
    model["vocab"] = vocab
    if "merges" not in model:
        return
    prefix = len(model.get("continuing_subword_prefix") or "")
    merges = []
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if left in vocab and right in vocab and left + right[prefix:] in vocab:
            merges.append(merge)
    model["merges"] = merges


def _dump(spec: Spec) -> str:
    return json.dumps(spec, ensure_ascii=False)


def sound_unicode(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD; surrogate pairs become the character they stand for."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
