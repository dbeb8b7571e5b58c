"""A run on the terminal: summary, trends, steps, and single trajectories down to their tokens.

Every function returns lines without control characters, whatever a model, a page or a file name put into them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.grading.interval import paired_rise
from agentrl.report.reader import RunView

# What a terminal obeys (C0, C1), what turns text around (bidirectional marks), and other line ends.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_BARS = "▁▂▃▄▅▆▇█"
_TREND = 40
_MAIN_METRICS = (
    *("reward/mean", "reward/missing", "groups/zero_variance", "rollouts/failed", "tokens/generated", "loss"),
    *("grad_norm", "clip_fraction", "kl/ref", "kl/mismatch", "recursivemas/link_norm_ratio", "time/total"),
)
_ROLLOUT_COLUMNS = ("reward/mean", "reward/missing", "rollouts/ok", "rollouts/failed", "tokens/generated")
_LINK_COLUMNS = ("loss", "recursivemas/link_norm_ratio", "recursivemas/latent_steps", "recursivemas/text_tokens")

Record = Mapping[str, Any]


def clean(text: str) -> str:
    """One line of text with every control character made visible: an escape becomes `\\x1b`."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def render_summary(view: RunView) -> list[str]:
    """What the run came to: evaluations with their intervals, the rise, checkpoints, seed and commit."""
    summary = view.summary
    last = view.metrics[-1]["step"] if view.metrics else 0
    lines = [f"run {view.name}: {last} steps" + ("" if summary else ", no summary yet (running or broken off)")]
    for key in ("eval_before", "eval_after"):
        if summary.get(key):
            lines.append(f"  {key}: {_evaluation(summary[key])}")
    if summary.get("rise"):
        lines.append(f"  rise: {_interval(summary['rise'], sign='+')}")
    if view.checkpoints:
        lines.append(f"  checkpoints: {', '.join(map(str, view.checkpoints))}")
    for key in ("seed", "attempts", "git_commit"):
        if summary.get(key) is not None:
            lines.append(f"  {key}: {summary[key]}")
    return _clean(lines)


def render_trend(view: RunView, names: Sequence[str] = _MAIN_METRICS) -> list[str]:
    """One line per metric that the run logged: first and last value, the range, and the course of it."""
    rows = []
    for name in names:
        values = [m[name] for m in view.metrics if isinstance(m.get(name), int | float)]
        if values:
            span = f"{_short(min(values))} .. {_short(max(values))}"
            rows.append((name, _short(values[0]), _short(values[-1]), span, _course(values)))
    return _table(("metric", "first", "last", "range", "course"), rows) if rows else []


def render_steps(view: RunView) -> list[str]:
    """One line per step: from its metrics, or where it logged none yet, from the trajectories that finished."""
    logged = {m["step"]: m for m in view.metrics}
    links = any("recursivemas/positions" in metrics for metrics in view.metrics)
    columns = ("step", *(_LINK_COLUMNS if links else _ROLLOUT_COLUMNS))
    rows = []
    for step in sorted({*logged, *view.steps}):
        metrics = logged[step] if step in logged else _counted(view.trajectories(step))
        values = [metrics.get(name) for name in columns[1:]]
        name = f"{step} (unfinished)" if step in view.unfinished else str(step)
        rows.append((name, *("-" if value is None else _short(value) for value in values)))
    return _table(columns, rows) if rows else ["no steps"]


def _counted(records: Sequence[Record]) -> dict[str, float | None]:
    rewards = [r["reward"] for r in records if r["reward"] is not None]
    failed = sum(r["status"] == "failed" for r in records)
    return {
        "reward/mean": sum(rewards) / len(rewards) if rewards else None,
        "reward/missing": len(records) - len(rewards),
        "rollouts/ok": len(records) - failed,
        "rollouts/failed": failed,
        "tokens/generated": sum(len(t["token_ids"]) for r in records for t in r["turns"]),
    }


def render_trajectories(records: Iterable[Record]) -> list[str]:
    """One line per trajectory of a step."""
    rows = [
        (
            record["id"],
            _reward(record),
            record["status"],
            len(record["turns"]),
            sum(len(t["token_ids"]) for t in record["turns"]),
            _cut(record["answer"], 40),
            _cut(record["reference"], 40),
        )
        for record in records
    ]
    columns = ("trajectory", "reward", "status", "turns", "tokens", "answer", "reference")
    return _table(columns, rows) if rows else ["no trajectories"]


def render_trajectory(record: Record, *, agent: str | None = None, tokens: bool = False) -> list[str]:
    """One trajectory: its turns in order, those of a called agent indented under their caller.

    `agent` leaves out the turns of all others; `tokens` lists every sampled token.
    """
    lines = [
        f"trajectory {record['id']}  task {record['task_id']}  {record['status']}"
        + (f" ({record['status_reason']})" if record["status_reason"] else ""),
        *_block("question: ", record["question"]),
        *_block("reference: ", record["reference"]),
        *_block("answer: ", record["answer"]),
        f"reward: {_reward(record)}" + (f"  {record['reward_reason']}" if record.get("reward_reason") else ""),
    ]
    for place, depth in _tree(record["turns"]):
        turn = record["turns"][place]
        if agent is None or turn["agent"] == agent:
            indent = "    " * depth
            lines.append("")
            lines += [indent + line for line in _turn(turn)]
            if tokens:
                lines += [indent + line for line in _tokens(turn)]
    return _clean(lines)


def render_comparison(a: RunView, b: RunView) -> list[str]:
    """Two runs side by side: their evaluations, the last value of each metric, and the paired difference."""
    rows: list[tuple[str, ...]] = []
    for key in ("eval_before", "eval_after"):
        if a.summary.get(key) or b.summary.get(key):
            rows.append((key, *(_evaluation(v.summary[key]) if v.summary.get(key) else "-" for v in (a, b))))
    for name in _MAIN_METRICS:
        last = [next((m[name] for m in reversed(v.metrics) if m.get(name) is not None), None) for v in (a, b)]
        if last != [None, None]:
            rows.append((name, *("-" if x is None else _short(x) for x in last)))
    lines = _table(("last value", a.name, b.name), rows)
    items = [v.summary.get("eval_after", {}).get("items", {}) for v in (a, b)]
    rise = paired_rise(*items)
    if rise["n"]:
        lines += _clean([f"{b.name} over {a.name}, {rise['n']} common items: {_interval(rise, sign='+')}"])
    return lines


def _tree(turns: Sequence[Record]) -> list[tuple[int, int]]:
    """(place, depth) of every turn, callers before those they called."""
    children: dict[int | None, list[int]] = {}
    for place, turn in enumerate(turns):
        children.setdefault(turn["parent"], []).append(place)
    order: list[tuple[int, int]] = []
    waiting = [(place, 0) for place in reversed(children.get(None, []))]
    while waiting:
        place, depth = waiting.pop()
        order.append((place, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(place, []))]
    return order


def _turn(turn: Record) -> list[str]:
    place = f"turn {turn['turn']}" + (f" call {turn['call']} bin {turn['bin']}" if turn["parent"] is not None else "")
    head = (
        f"[{place}] {turn['agent']}  {turn['policy']} v{turn['policy_version']}  "
        f"{turn['prompt_tokens']} + {len(turn['token_ids'])} tokens  {turn['finish_reason']}"
    )
    if turn["score"] is not None:
        head += f"  score {_short(turn['score'])}"
    elif turn["score_reason"]:
        head += "  score missing"
    lines = [head]
    lines += _block("  reason: ", turn["score_reason"]) if turn["score_reason"] else []
    lines += _block("  | ", turn["text"])
    for name in ("tool", "purpose", "error"):
        if turn.get(name):
            lines += _block(f"  {name}: ", turn[name])
    if turn["observation"] is not None:
        if turn["items"] or turn["truncated"]:
            lines.append(f"  observed {turn['items']} items, {turn['truncated']} tokens cut")
        lines += _block("  > ", turn["observation"])
    return lines


def _tokens(turn: Record) -> list[str]:
    rows = []
    for place, token in enumerate(turn["token_ids"]):
        known = {n: (turn.get(n) or [None] * (place + 1))[place] for n in ("old_logprobs", "advantage", "mask_reason")}
        trained = (turn.get("loss_mask") or [None] * (place + 1))[place]
        rows.append(
            (
                place,
                token,
                turn["agent"],
                turn["policy_version"],
                _logprob(turn["logprobs"][place]),
                _logprob(known["old_logprobs"]),
                "-" if known["advantage"] is None else f"{known['advantage']:+.3f}",
                known["mask_reason"] or ("trained" if trained else "-"),
            )
        )
    columns = ("#", "token id", "agent", "version", "behaviour (T=1)", "old (sampling T)", "advantage", "mask")
    return ["  " + line for line in _table(columns, rows)]


def _evaluation(block: Record) -> str:
    missing = f", {block['missing']} missing" if block.get("missing") else ""
    return f"{_interval({**block, 'value': block['score']})}, {block['k']} of {block['n']}{missing}"


def _interval(block: Record, sign: str = "") -> str:
    if block["value"] is None:
        return "no score"
    return f"{block['value']:{sign}.3f} (95%: {block['low']:{sign}.3f} to {block['high']:{sign}.3f})"


def _reward(record: Record) -> str:
    if record["reward"] is None:
        return f"missing: {record['reward_missing_reason']}"
    return _short(record["reward"])


def _block(prefix: str, text: str | None) -> list[str]:
    """A text with `prefix` before its first line and its further lines aligned, or marked by the same bar."""
    lines = ("-" if text is None else str(text)).split("\n")
    rest = prefix if prefix.strip() in ("|", ">") else " " * len(prefix)
    return [prefix + lines[0], *(rest + line for line in lines[1:])]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [list(columns), *([clean(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _course(values: Sequence[float]) -> str:
    """A bar per step; of a long run, per mean of several."""
    size = -(-len(values) // _TREND)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _logprob(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _cut(text: str | None, length: int) -> str:
    flat = "-" if text is None else " ".join(str(text).split())
    return flat if len(flat) <= length else flat[: length - 3] + "..."


def _clean(lines: Iterable[str]) -> list[str]:
    return [clean(line) for line in lines]
