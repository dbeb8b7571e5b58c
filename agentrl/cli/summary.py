"""What a verb returned, as lines for a reader: plain values first, then answers with their traces, then scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.cli import console
from agentrl.cli.comparison import show_controls, show_reductions

_LEFT_OUT = ("items", "versions", "config", "training")  # `--json` and the run folder hold them
_SCORES = {"eval_before": "held-out before", "eval_after": "held-out after", "eval": "held-out", "rise": "rise"}


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print a summary: `key: value` lines, an answer with who said what, and each evaluation in one line at the end."""
    last: list[str] = []
    for key, value in summary.items():
        if key in _SCORES and _is_score(value):
            last.append(f"{_SCORES[key]}: {_rise(value) if key == 'rise' else _score(value)}")
        elif key == "answers" and isinstance(value, (list, tuple)) and all("turns" in item for item in value):
            for answer in value:
                _show_answer(answer)
        elif key == "answers" and isinstance(value, (list, tuple)) and all("trace" in item for item in value):
            for answer in value:
                _show_thoughts(answer)
        elif key == "controls" and isinstance(value, Mapping) and all("strict" in row for row in value.values()):
            show_controls(value)
        elif key == "reductions" and isinstance(value, Mapping):
            show_reductions(value)
        else:
            _show(key, value)
    for line in last:
        console.out(line)


def _show(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _LEFT_OUT:
                # Metrics have names of their own (reward/mean), under which they stand in metrics.jsonl too.
                _show(key if name == "rollouts" else f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            _show(f"{name}[{index}]", item)
    else:
        console.out(f"{name}: {round(value, 6) if isinstance(value, float) else value}")


def _show_answer(answer: Mapping[str, Any]) -> None:
    """A question, who said what, what came back where no other agent's words say it already, and the answer."""
    console.out(f"question: {answer['question']}")
    told = {turn.get("parent") for turn in answer["turns"]}
    for place, turn in enumerate(answer["turns"]):
        console.out(_indented(turn["agent"], turn["text"]))
        if turn.get("observation") and place not in told:
            console.out(_indented(turn.get("tool") or "environment", turn["observation"]))
    reason = f" ({answer['status_reason']})" if answer.get("status_reason") else ""
    console.out(f"answer: {'none' if answer['answer'] is None else answer['answer']}{reason}")


def _show_thoughts(answer: Mapping[str, Any]) -> None:
    """A question, what every agent thought in each round, the text, the answer, and what it all cost."""
    console.out(f"question: {answer['question']}")
    rows = [
        (
            stage["round"],
            stage["agent"],
            stage["steps"],
            stage["positions"],
            stage["reused"],
            "-" if stage["state_norm"] is None else f"{stage['state_norm']:.2f}",
            ", ".join(f"{edge} {norm:.2f}" for edge, norm in stage["sent_norm"].items()),
        )
        for stage in answer["trace"]
    ]
    console.table(
        ("round", "agent", "steps", "positions", "reused", "state norm", "sent, norm"), rows, "latent thoughts"
    )
    console.out(_indented("text", answer["text"]))
    reason = f" ({answer['status_reason']})" if answer.get("status_reason") else ""
    console.out(f"answer: {'none' if answer['answer'] is None else answer['answer']}{reason}")
    counts = answer["counts"]
    console.table([name.replace("_", " ") for name in counts], [[f"{n:g}" for n in counts.values()]], "counts")


def _indented(who: str, text: str) -> str:
    head = f"  {who}: "
    return head + text.strip().replace("\n", "\n" + " " * len(head))


def _is_score(value: Any) -> bool:
    return isinstance(value, Mapping) and {"low", "high", "n"} <= set(value)


def _score(block: Mapping[str, Any]) -> str:
    """`0.640 (128/200, 95% interval 0.571 to 0.703)`; `6.31 (n 200, ...)` where scores are not just right or wrong."""
    if block["score"] is None:
        return f"no score ({block['missing']} missing)"
    missing = f", {block['missing']} missing" if block.get("missing") else ""
    interval = f"95% interval {block['low']:.3f} to {block['high']:.3f}"
    counted = f"{block['k']}/{block['n']}" if _right_or_wrong(block) else f"n {block['n']}"
    return f"{block['score']:.3f} ({counted}, {interval}{missing})"


def _right_or_wrong(block: Mapping[str, Any]) -> bool:
    """Whether the mean is k of n: then every score is 0 or 1, whether or not the items are still there."""
    return abs(float(block["score"] * block["n"] - block["k"])) < 1e-6


def _rise(block: Mapping[str, Any]) -> str:
    if block["value"] is None:
        return "no item has both scores"
    return f"{block['value']:+.3f} (paired 95% interval {block['low']:+.3f} to {block['high']:+.3f}, n {block['n']})"
