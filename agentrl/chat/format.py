"""A model's chat format: its template, its tokenizer twice (trusted text and text from the world), its end tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer

from agentrl.chat.template import compile_template, find_templates
from agentrl.chat.world import continuing, sound_unicode, starting, without_added_tokens
from agentrl.errors import ConfigError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateRefusal(Exception):
    """The template raised, or failed, on these messages. Callers turn it into a `ConfigError` that names them."""


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """What the template puts after an assistant turn: `marker` ends it, `trailing` (a newline, say) follows."""

    marker: tuple[int, ...]
    trailing: tuple[int, ...]
    text: str


class ChatFormat:
    """Renders messages and encodes text for one model. Immutable after construction; safe to share."""

    def __init__(
        self,
        tokenizer_spec: Mapping[str, Any],
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        extra_added_tokens: Sequence[AddedToken] = (),
        now: datetime | None = None,
    ) -> None:
        """`tokenizer_spec` is tokenizer.json, `templates` sources by name, `special_tokens` bos_token and so on."""
        full = starting(dict(tokenizer_spec))
        full.add_tokens(list(extra_added_tokens))
        full.add_special_tokens([t for t in special_tokens.values() if t])
        spec = json.loads(full.to_str())
        self.special_tokens = dict(special_tokens)
        self.added_tokens: dict[int, str] = {i: t.content for i, t in full.get_added_tokens_decoder().items()}
        self._added_ids = frozenset(self.added_tokens)
        self._start: Tokenizer = full
        self._continue, self._prefixed = continuing(spec, full)
        self._world = without_added_tokens(spec, self.added_tokens)
        self._templates = {name: compile_template(source, now) for name, source in templates.items()}
        self._sources = dict(templates)
        self._declared_eos = tuple(eos_ids)
        self.vocab_size = max(full.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_folder(cls, path: str | Path, now: datetime | None = None) -> ChatFormat:
        """Read a model's folder: tokenizer.json, its config, its template, its end tokens; no weights.

        `now` fixes the date that some templates print. Raises `ConfigError` when a file is missing or malformed.
        """
        folder = Path(path)
        spec = _read_json(folder / "tokenizer.json", required=True)
        config = _read_json(folder / "tokenizer_config.json")
        named = dict(config)
        if "added_tokens_decoder" not in config:
            named.update(_read_json(folder / "special_tokens_map.json"))
        special = {k: _content(named[k]) for k in SPECIAL_TOKENS if named.get(k) is not None}
        known = {t["content"] for t in spec.get("added_tokens", ())}
        decoder = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
        extra = [AddedToken(**t) for _, t in decoder if t["content"] not in known]
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is None:
            eos = _read_json(folder / "config.json").get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        return cls(spec, find_templates(folder, config), special, eos_ids, extra, now)

    # Templates

    def _template_name(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" not in self._templates:
            raise ConfigError(
                f"the model has several chat templates and none is the default: {sorted(self._templates)}",
                "name one of them `default` (chat_template.jinja)",
            )
        return "default"

    def mentions(self, role: str, with_tools: bool = False) -> bool:
        """Whether the template's source names this role, so that it was written for it."""
        return re.search(rf"""['"]{re.escape(role)}['"]""", self._sources[self._template_name(with_tools)]) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
        enable_thinking: bool | None = None,
    ) -> str:
        """The text transformers' `apply_chat_template(tokenize=False)` gives. Raises `TemplateRefusal`."""
        template = self._templates[self._template_name(tools is not None)]
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return template.render(
                messages=[dict(m) for m in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **{**self.special_tokens, **switches},
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as fault:
            raise TemplateRefusal(f"{type(fault).__name__}: {fault}") from fault

    # Ids

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token, added ones included, as the tokenizer spells it, and its id."""
        return self._start.get_vocab(with_added_tokens=True)

    def encode_trusted(self, text: str, continues: bool = False) -> tuple[int, ...]:
        """Ids of template text, added tokens included, nothing added around them.

        `continues`: the text stands after other ids, so a sentencepiece-like tokenizer prepends no space to it.
        """
        text = sound_unicode(text)
        if not (continues and self._prefixed):
            return tuple(self._start.encode(text, add_special_tokens=False).ids)
        head = self._continue.encode(text, add_special_tokens=False)
        for i, token in enumerate(head.ids):
            # After an added token the tokenizer's own rule holds again, as in an encoding of the whole text.
            if token in self._added_ids:
                rest = text[head.offsets[i][0] :]
                return (*head.ids[:i], *self._start.encode(rest, add_special_tokens=False).ids)
        return tuple(head.ids)

    def encode_world(self, text: str) -> tuple[int, ...]:
        """Ids of text from the world: never the id of an added token, whatever the text says.

        Nothing is prepended. Lone surrogates become U+FFFD. Characters that a tokenizer without byte fallback cannot
        write are left out.
        """
        if not text:
            return ()
        ids = self._world.encode_batch_fast([sound_unicode(text)], add_special_tokens=False)[0].ids
        if self._added_ids.isdisjoint(ids):
            return tuple(ids)
        # Only an unknown token that the tokenizer's model cannot do without gets here.
        return tuple(i for i in ids if i not in self._added_ids)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """A view of the ids as they read in the middle of a text: a leading space is kept. Never trained on."""
        return self._continue.decode(list(ids), skip_special_tokens=skip_special)

    def decode_completion(self, ids: Sequence[int]) -> str:
        """The text of a completion without the end token it was sampled with."""
        ids = tuple(ids)
        return self.decode(ids[: len(ids) - self.sampled_end(ids)])

    # End tokens

    @cached_property
    def end_of_turn(self) -> EndOfTurn:
        """Derived from renders: what follows an assistant's content. Raises `ConfigError` when it cannot be found."""
        ask, say, reply = "agentrlQuestion", "agentrlAnswer", "agentrlReply"
        turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
        try:
            last = self.render(turns)
            middle = self.render([*turns, {"role": "user", "content": reply}])
        except TemplateRefusal as refusal:
            raise ConfigError(
                f"the chat template refuses user and assistant turns: {refusal}",
                "use a model whose template holds a plain conversation",
            ) from refusal
        if last.count(say) != 1 or middle.count(say) != 1 or middle.count(reply) != 1:
            raise ConfigError(
                "the chat template does not print each turn's content exactly once, as it is",
                "use a model whose template prints contents unchanged",
            )
        after_last = last.split(say)[1]
        after_middle = middle.split(say)[1].split(reply)[0]
        size = next(
            (i for i, (a, b) in enumerate(zip(after_last, after_middle, strict=False)) if a != b),
            min(len(after_last), len(after_middle)),
        )
        # A newline that the template writes only between turns belongs to the end of a turn as well.
        while size < len(after_middle) and after_middle[size].isspace():
            size += 1
        text = after_middle[:size]
        ids = self.encode_trusted(text, continues=True)
        places = [i for i, token in enumerate(ids) if token in self._added_ids]
        cut = places[-1] + 1 if places else len(ids)
        return EndOfTurn(ids[:cut], ids[cut:], text)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a completion: the generation config's, the tokenizer's, the template's end marker."""
        named = [self._start.token_to_id(t) for k, t in self.special_tokens.items() if k == "eos_token"]
        marker = [i for i in self.end_of_turn.marker if i in self._added_ids][:1]
        return tuple(i for i in dict.fromkeys([*self._declared_eos, *named, *marker]) if i is not None)

    @cached_property
    def pad_id(self) -> int:
        """The padding token's id; the first end token's, then 0, where there is none."""
        pad = self._start.token_to_id(self.special_tokens.get("pad_token", ""))
        return next(iter(self.eos_ids), 0) if pad is None else pad

    def sampled_end(self, ids: Sequence[int]) -> int:
        """How many ids at the end of a completion end its turn: 0 when it was cut by length or by a stop string.

        Only what was sampled last counts, so a padding id equal to an end token is no problem.
        """
        marker = self.end_of_turn.marker
        for size in range(len(marker), 0, -1):
            whole = size == len(marker) or marker[size - 1] in self.eos_ids
            if whole and tuple(ids[-size:]) == marker[:size]:
                return size
        return 1 if len(ids) and ids[-1] in self.eos_ids else 0

    def sampled_marker(self, ids: Sequence[int]) -> int:
        """How many ids of the template's end marker the environment must leave out after this completion.

        Any end token stands for a marker that is a control token; a marker of plain text stays to be written.
        """
        marker = self.end_of_turn.marker
        size = self.sampled_end(ids)
        if size and tuple(ids[-size:]) == marker[:size]:
            return size
        return len(marker) if size and not self._added_ids.isdisjoint(marker) else 0


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"{path} is missing", "name a model folder that holds a tokenizer.json")
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as fault:
        raise ConfigError(f"{path} is not valid JSON: {fault}", "fetch the model's folder again") from fault
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", "fetch the model's folder again")
    return value


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
