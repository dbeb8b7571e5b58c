"""The rule that coaches the embedded reading team (`recipes/smoke/mappa.yaml`): reader, answerer, speaker.

It knows the reference, so the recipe names all three agents in `coach.ground_truth`. An agent whose input lacks the
answer is not to blame for it: it is scored by whether it kept to its form and to what it saw.
"""

from __future__ import annotations

import re

from agentrl.grading.qa import f1, normalise
from agentrl.protocols import CoachView

READER, ANSWERER, SPEAKER = "reader", "answerer", "speaker"
_CONTROL = re.compile(r"<\|[^|]*\|>")
_TAGGED = re.compile(r"<answer>([^<>]*)</answer>")


def reading(view: CoachView) -> tuple[float, str]:
    """Ten times the word overlap with what the agent should have said; the speaker earns half of it by its form.

    Raises `ValueError` for an agent of another team, and for a task without a reference.
    """
    said = view.action.strip()
    if view.ground_truth is None:
        raise ValueError("this rule needs coach.ground_truth to name all three agents")
    if not normalise(said):
        return 0.0, "said nothing"
    if view.agent == READER:
        return _rounded(f1(said, [str(view.task.info["sentence"])])), "overlap with the sentence that answers"
    seen = normalise(_CONTROL.sub(" ", view.observed.rpartition("From ")[2])).split()
    has_answer = normalise(view.ground_truth) in seen
    if view.agent == ANSWERER:
        if has_answer:
            return _rounded(f1(said, [view.ground_truth])), "overlap with the answer"
        kept = len(normalise(said).split()) == 1 and normalise(said) in seen
        return (6.0 if kept else 2.0), "its input lacks the answer"
    if view.agent != SPEAKER:
        raise ValueError(f"this rule coaches {READER}, {ANSWERER} and {SPEAKER}, not {view.agent!r}")
    tagged = _TAGGED.search(said)
    form = 0.0 if tagged is None else 1.0 if tagged.group() == said else 0.5
    told = said if tagged is None else tagged.group(1)
    overlap = f1(told, [view.ground_truth]) if has_answer else float(normalise(told) in seen)
    return _rounded((form + overlap) / 2), "form and overlap with the answer"


def _rounded(share: float) -> float:
    return round(10 * share, 2)
