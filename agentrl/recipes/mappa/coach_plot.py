"""One picture of a coach: how its scores part right from wrong, and how it stands beside the blind ones."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.recipes.mappa.actions.store import Label, RecordedAction
from agentrl.recipes.mappa.coach_quality import Scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RIGHT, _WRONG = "#2a7f62", "#c44536"


def draw(
    actions: Sequence[RecordedAction],
    labels: Mapping[str, Label],
    results: Mapping[str, Scored],
    measured: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """The picture as PNG bytes. The first of `results` is the coach, the others stand beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    (scores, areas), (kinds, culprits) = figure.subplots(2, 2)
    name = next(iter(results))
    _histogram(scores, actions, labels, results[name], name)
    _bars(areas, {n: m["auc"] for n, m in measured.items()}, "separation of right from wrong (AUC)", 0.5)
    _kinds(kinds, measured[name]["strata"])
    chance = measured[name]["blame"]["chance"]
    _bars(culprits, {n: m["blame"] for n, m in measured.items()}, "the one to blame scores lowest (share)", chance)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


def _histogram(
    axes: Axes, actions: Sequence[RecordedAction], labels: Mapping[str, Label], scored: Scored, name: str
) -> None:
    sides: dict[bool, list[float]] = {True: [], False: []}
    for repeat in scored.repeats:
        for action, score in zip(actions, repeat, strict=True):
            if score.value is not None:
                sides[labels[action.id].right].append(score.value)
    edges = [x - 0.5 for x in range(12)]
    values, shown = [sides[True], sides[False]], [f"right ({len(sides[True])})", f"wrong ({len(sides[False])})"]
    axes.hist(values, bins=edges, label=shown, color=[_RIGHT, _WRONG])
    axes.set(title=f"scores of {name}", xlabel="score, 0 to 10", ylabel="scores given")
    axes.legend()


def _bars(axes: Axes, blocks: Mapping[str, Mapping[str, Any]], title: str, chance: float | None) -> None:
    """A bar with its interval per coach, and a line where chance lies. One without a value has no bar."""
    for place, block in enumerate(blocks.values()):
        if block["value"] is None:
            axes.text(place, 0.5, "no scores", ha="center")
            continue
        axes.bar(place, block["value"], color=_RIGHT if place == 0 else "#9aa0a6")
        if block["low"] is not None:
            axes.plot([place, place], [block["low"], block["high"]], color="black", linewidth=1.5)
    if chance is not None:
        axes.axhline(chance, color="black", linestyle=":", linewidth=1)
    axes.set(title=title, ylim=(0, 1))
    axes.set_xticks(range(len(blocks)), list(blocks))


def _kinds(axes: Axes, strata: Mapping[str, Mapping[str, Any]]) -> None:
    known = {kind: block["bias"] for kind, block in strata.items() if block["bias"] is not None}
    axes.bar(list(known), list(known.values()), color="#5b7db1")
    axes.axhline(0, color="black", linewidth=1)
    axes.set(title="bias per kind of task", ylabel="points above the other kinds")
