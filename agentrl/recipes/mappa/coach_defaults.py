"""Coaches that `coach-eval` knows by a word, as `coach` sections: what a recipe would say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agentrl.errors import ConfigError

SHORT_TEMPLATE = """\
Score one action from 0 to 10. 10: exactly what the role asks. 5: partly. 0: empty, false, or not what the role asks.
Answer with one JSON object: {"score": N}.

{{agent}} has the role: {{role}}
The task:
{{task}}
It saw:
{{observed}}
It did:
{{action}}
The environment answered: {{feedback}}
Files: {{ledger}}
Ground truth: {{ground_truth}}
How good was the action of {{agent}}?"""
"""Little to read, for a small model on a CPU; what is the same for every action stands first and is computed once."""

SECTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "rules": {"rules": "evidence"},
        "local": {
            "model": "smollm2-135m",
            "template": SHORT_TEMPLATE,
            "reply": "score",
            "max_chars": 200,
            "max_tokens": 24,
            "max_concurrent": 64,
            "max_retries": 1,
            "temperature": 0.7,
            "timeout_s": 900,
        },
        "endpoint": {},
        "constant": {"value": 5},
        "random": {},
    }
)
"""At temperature 0.7 the repeats of a local model differ, as those of a service do."""

_OF_ONE_KIND = ("model", "base_url", "api_key_env", "rules", "value", "template")


def section_overrides(kind: str) -> list[str]:
    """The `--set` texts that put one of the sections in place of a recipe's coach. Raises `ConfigError` for no kind."""
    if kind not in SECTIONS:
        raise ConfigError(f"coach.kind: {kind!r} is no coach", f"use one of {', '.join(SECTIONS)}")
    clear: dict[str, Any] = dict.fromkeys(_OF_ONE_KIND)
    values = {"kind": kind, "reply": "analysis", "ground_truth": [], **clear, **SECTIONS[kind]}
    return [f"coach.{key}={json.dumps(value)}" for key, value in values.items()]


def chosen_kind(overrides: Sequence[str]) -> str:
    """The `coach.kind` that `--set` texts ask for, else rules: it needs no key and no model."""
    asked = [text.partition("=")[2].strip() for text in overrides if text.partition("=")[0].strip() == "coach.kind"]
    return asked[-1] if asked else "rules"
