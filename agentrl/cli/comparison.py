"""The table of an evaluation beside its controls, for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.cli import console

_COSTS = ("text_tokens", "latent_steps", "prompt_positions", "positions")


def show_controls(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """One line per row: right answers by both measures, the paired difference to the ring, costs per question kept
    apart, wall seconds of all questions; then the seconds of each row's stages."""
    lenient = any("lenient" in row for row in rows.values())
    f1 = any("f1" in row for row in rows.values())
    columns = ["", "right", "95% interval", *(["as published"] if lenient else []), *(["F1"] if f1 else [])]
    columns += ["against the ring", "text tokens", "latent steps", "prompt positions", "positions computed"]
    columns += ["tokens per message", "seconds"]
    table = []
    for name, row in rows.items():
        measures = [_k(row["strict"]), _interval(row["strict"])]
        measures += [_k(row["lenient"]) if "lenient" in row else "-"] if lenient else []
        measures += [_number(row["f1"]["score"], ".3f") if "f1" in row else "-"] if f1 else []
        costs = [_number(row[f"{key}_per_question"], ".1f") for key in _COSTS]
        message = _number(row.get("tokens_per_message"), ".1f")
        table.append(
            [name, *measures, _difference(row.get("difference")), *costs, message, f"{row['seconds']['wall']:.2f}"]
        )
    console.table(columns, table, "the ring and its controls; tokens, steps and positions per question")
    stages = [
        (name, ", ".join(f"{stage} {took:.2f}" for stage, took in _parts(row["seconds"]))) for name, row in rows.items()
    ]
    console.table(("", "warm wall seconds by stage"), stages)


def show_reductions(values: Mapping[str, float]) -> None:
    """How the ring compares with the text team."""
    console.out(
        f"against the text team: {values['text_tokens']:.1%} fewer text tokens, "
        f"{values['text_tokens_and_latent_steps']:.1%} with latent steps counted as tokens, "
        f"{values['times_faster']:.2f} times as fast"
    )


def _parts(seconds: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [*seconds["stages"].items(), ("decode", seconds["decode"])]


def _k(block: Mapping[str, Any]) -> str:
    missing = f" ({block['missing']} missing)" if block["missing"] else ""
    return f"{block['k']}/{block['n']}{missing}"


def _interval(block: Mapping[str, Any]) -> str:
    return "-" if block["low"] is None else f"{block['low']:.3f} to {block['high']:.3f}"


def _difference(block: Mapping[str, Any] | None) -> str:
    if block is None or block["value"] is None:
        return "-"
    return f"{block['value']:+.3f} ({block['low']:+.3f} to {block['high']:+.3f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
