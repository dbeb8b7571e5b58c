"""Whether an action of the recorded teams was right, by rules that know the reference: what the labels are made of.

An agent whose input is broken is right when it did what its role asks with what it was handed; inventing an answer that
is not in its input is wrong, whoever broke it.
"""

from __future__ import annotations

import re

from agentrl.grading.qa import normalise
from agentrl.recipes.mappa.actions.faults import Scene

_NUMBER = re.compile(r"-?\d+")
_TAGGED = re.compile(r"<answer>([^<>]+)</answer>")


def sound(scene: Scene, feedback: str | None, saved: bool) -> bool:
    """`feedback` is what its tools answered, `saved` whether it left every file that it must. Raises `KeyError` for an
    agent of another team."""
    return {"reader": _reader, "answerer": _answerer, "speaker": _speaker, "coder": _coder, "reporter": _reporter}[
        scene.agent
    ](scene, feedback, saved)


def _reader(scene: Scene, feedback: str | None, saved: bool) -> bool:
    return scene.said.strip() == str(scene.task.info["sentence"])


def _answerer(scene: Scene, feedback: str | None, saved: bool) -> bool:
    """One word: what the handed sentence says of its animal, its last; any of its words where it is cut."""
    said, handed = normalise(scene.said).split(), normalise(scene.handed).split()
    whole = scene.handed.strip().endswith(".")
    return len(said) == 1 and said[0] in (handed[-1:] if whole else handed)


def _speaker(scene: Scene, feedback: str | None, saved: bool) -> bool:
    return bool(scene.handed.strip()) and scene.said.strip() == f"<answer>{scene.handed.strip()}</answer>"


def _coder(scene: Scene, feedback: str | None, saved: bool) -> bool:
    return saved and feedback is not None and feedback.strip() == scene.task.references[0]


def _reporter(scene: Scene, feedback: str | None, saved: bool) -> bool:
    """The number that was printed, or "none" where none was."""
    printed = scene.handed.strip()
    tagged = _TAGGED.fullmatch(scene.said.strip())
    return tagged is not None and tagged.group(1) == (printed if _NUMBER.fullmatch(printed) else "none")
