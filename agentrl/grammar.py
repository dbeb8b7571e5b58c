"""Constrained decoding, shared by engines and the update core.

One compiled grammar serves the hf engine (masks while it samples) and the trainer (the same masks, rebuilt by
replaying the sampled ids). Both go through `llguidance`, which is also vLLM's `guidance` backend; the grammar text
is serialised as vLLM does it (flexible JSON whitespace, default slices), so every engine allows the same tokens.

Shapes: V vocabulary rows of the model, W = ceil(V / 32) packed words, T tokens of a completion.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import llguidance
import llguidance.numpy as llguidance_numpy
import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError, MissingError
from agentrl.types import Grammar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_COMPILED = 1024  # grammars kept per factory; a workflow may make one per question


class GrammarViolationError(ValueError):
    """A token that the grammar does not allow at its place."""

    def __init__(self, grammar: Grammar, position: int, token: int) -> None:
        super().__init__(f"token {token} at position {position} is not allowed by the {grammar.kind} {grammar.text!r}")
        self.position = position
        self.token = token


@dataclass(frozen=True, slots=True)
class Replay:
    """The allowed sets behind a completion. `bitmask_TW` is int32, bit v % 32 of word v // 32 is token v, and row t
    is the set before token t; `constrained_T` where the set is smaller than V, `forced_T` where it is one token."""

    bitmask_TW: NDArray[np.int32]
    constrained_T: NDArray[np.bool_]
    forced_T: NDArray[np.bool_]


class GrammarMatcher:
    """One completion's walk through a grammar. Made by `GrammarFactory.matcher`."""

    def __init__(self, grammar: Grammar, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self.grammar = grammar
        self.ll_matcher = matcher
        self._vocab_size = vocab_size
        self._position = 0
        self._bitmask_W: NDArray[np.int32] | None = None

    def bitmask(self) -> NDArray[np.int32]:
        """The packed set of allowed next tokens, shape (W,). A complete grammar leaves the end tokens only."""
        if self._bitmask_W is None:
            mask_1W = llguidance_numpy.allocate_token_bitmask(1, self._vocab_size)
            llguidance_numpy.fill_next_token_bitmask(self.ll_matcher, mask_1W, 0)
            self._bitmask_W = mask_1W[0]
        return self._bitmask_W

    def allowed(self) -> NDArray[np.bool_]:
        """The set of allowed next tokens, shape (V,)."""
        return unpack(self.bitmask(), self._vocab_size)

    @property
    def num_allowed(self) -> int:
        return int.from_bytes(self.bitmask().tobytes(), "little").bit_count()

    @property
    def forced(self) -> bool:
        """Whether exactly one token is allowed next."""
        return self.num_allowed == 1

    @property
    def constrained(self) -> bool:
        """Whether the grammar cuts the next token's set at all."""
        return self.num_allowed < self._vocab_size

    def advance(self, token: int) -> None:
        """Take one token. Raises `GrammarViolationError` when it is not allowed."""
        bitmask_W = self.bitmask()
        in_range = 0 <= token < self._vocab_size
        if not in_range or not (int(bitmask_W[token // 32]) >> (token % 32)) & 1:
            raise GrammarViolationError(self.grammar, self._position, token)
        self.accept(token)

    def accept(self, token: int) -> None:
        """Take one token that was sampled under the mask. Raises `GrammarViolationError` if the parser refuses it."""
        if not self.ll_matcher.consume_token(token):
            raise GrammarViolationError(self.grammar, self._position, token)
        self._position += 1
        self._bitmask_W = None


class GrammarFactory:
    """Compiles grammars for one tokenizer, and keeps them.

    `vocab_size` is the number of rows of the model's head; rows beyond the tokenizer are never allowed. All of
    `eos_ids` end a complete grammar. For masks equal to vLLM's, pass the tokenizer's own end token alone, as
    `from_folder` does: vLLM knows no other under a grammar. Safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer | str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise ConfigError("a grammar needs an end token, and the tokenizer names none", "set eos_token")
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
        try:
            self._ll_tokenizer = llguidance.LLTokenizer(_without_padding(text), vocab_size, list(eos_ids))
        except ValueError as error:
            raise ConfigError(
                f"this tokenizer cannot be used with a grammar: {_one_line(str(error))}",
                "use a byte-level or byte-fallback tokenizer that fits the model, or drop the grammar",
            ) from error
        self._executor = llguidance.LLExecutor()
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path) -> GrammarFactory:
        """The factory of a model folder in Hugging Face layout, with the end token that vLLM uses: the tokenizer's."""
        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
            tokenizer = (folder / "tokenizer.json").read_text("utf-8")
        except FileNotFoundError as error:
            raise MissingError(f"{error.filename} is missing", "prepare the model again") from error
        eos = tokenizer_config.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        ids = [t["id"] for t in json.loads(tokenizer)["added_tokens"] if t["content"] == content]
        return cls(tokenizer, config["vocab_size"], ids)

    @property
    def num_words(self) -> int:
        """W: packed words of one bitmask."""
        return (self.vocab_size + 31) // 32

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A fresh walk. Raises `ConfigError` for a grammar that does not compile."""
        with self._lock:
            base = self._compiled.get(grammar)
            if base is None:
                base = self._compile(grammar)
                self._compiled[grammar] = base
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarMatcher(grammar, base.deep_copy(), self.vocab_size)

    def fill(self, matchers: Sequence[tuple[GrammarMatcher, int]], bitmask_BW: NDArray[np.int32]) -> None:
        """Write the allowed set of each (matcher, row) into its row, in parallel. Other rows stay as they are."""
        pairs = [(matcher.ll_matcher, row) for matcher, row in matchers]
        llguidance_numpy.fill_next_token_bitmask_par(self._executor, pairs, bitmask_BW)

    def replay(self, grammar: Grammar, ids: Sequence[int]) -> Replay:
        """The allowed set before each token of a completion. Raises `GrammarViolationError` at a token outside it."""
        matcher = self.matcher(grammar)
        bitmask_TW = np.zeros((len(ids), self.num_words), dtype=np.int32)
        counts_T = np.zeros(len(ids), dtype=np.int64)
        for t, token in enumerate(ids):
            bitmask_TW[t] = matcher.bitmask()
            counts_T[t] = matcher.num_allowed
            matcher.advance(token)
        return Replay(bitmask_TW, counts_T < self.vocab_size, counts_T == 1)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        try:
            if grammar.kind == "regex":
                spec = llguidance.LLMatcher.grammar_from_regex(grammar.text)
            else:
                spec = llguidance.LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_flexible": True}
                )
            fault = llguidance.LLMatcher.validate_grammar(spec, self._ll_tokenizer)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"invalid {grammar.kind} grammar {grammar.text!r}: {_one_line(fault)}",
                "correct it (look-around and back-references are not supported)",
            )
        return llguidance.LLMatcher(self._ll_tokenizer, spec, log_level=0)


def unpack(bitmask_W: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Packed words (..., W) -> bool (..., V)."""
    bits = np.unpackbits(bitmask_W.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def _without_padding(tokenizer_json: str) -> str:
    data = json.loads(tokenizer_json)
    return json.dumps({**data, "padding": None, "truncation": None})


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
