"""Reading what a judge or a coach replied, strictly: a reply in doubt is a `ValueError`, never a number.

A reply is one JSON object in the asked form, alone, in a fence or with words around it; or one of a few plain forms,
because not every service can force JSON. Thinking is left out first. Two statements that differ are a fault: one of
them may be a quotation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_CHARS = 100_000
_MAX_STRAY_BRACES = 100
_FENCE = re.compile(r"\A```[A-Za-z]*\s*\n(.*?)\n?\s*```\Z", re.DOTALL)
_NUMBER = r"([+-]?\d+(?:\.\d+)?)"
_OF_TEN = r"(?:[ \t]*/[ \t]*10|[ \t]+out[ \t]+of[ \t]+10)?"
# No two neighbours in these patterns can match the same character, so that they take linear time.
_OPEN, _CLOSE, _LEAD = r"[ \t*_`\"'\[(]*", r"[ \t*_`\"'\])]*", r"^[ \t*_`#>-]*"
_SCORE = rf"{_OPEN}{_NUMBER}{_OF_TEN}{_CLOSE}(?:\.[ \t]*)?"
_WORD = rf"{_OPEN}(yes|no){_CLOSE}(?:[.,!][ \t]*)?"
_SCORE_ALONE = re.compile(_SCORE, re.IGNORECASE)
_VERDICT_ALONE = re.compile(_WORD, re.IGNORECASE)
_SCORE_LINE = re.compile(
    rf"{_LEAD}(?:process[_ ]|final[_ ])?(?:score|rating){_CLOSE}[:=]{_SCORE}$", re.IGNORECASE | re.MULTILINE
)
_VERDICT_LINE = re.compile(rf"{_LEAD}(?:correct|verdict){_CLOSE}[:=]{_WORD}$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's ruling. `confidence` is in percent, None where the judge gave none."""

    correct: bool
    extracted: str | None = None
    reasoning: str | None = None
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Rating:
    """A coach's score, from 0 to 10, and why."""

    score: float
    analysis: str | None = None


def parse_verdict(reply: str) -> Verdict:
    """The judge's yes or no. Raises `ValueError` for anything else, two that differ included."""
    text = without_thinking(reply)
    value = _json_value(text, "correct")
    if isinstance(value, dict):
        return Verdict(
            _yes_or_no(value["correct"]),
            _optional_text(value.get("extracted_answer")),
            _optional_text(value.get("reasoning")),
            _confidence(value.get("confidence")),
        )
    if (alone := _VERDICT_ALONE.fullmatch(text)) is not None:
        return Verdict(alone.group(1).lower() == "yes")
    return Verdict(_one_of([m.lower() for m in _VERDICT_LINE.findall(text)], "verdict") == "yes")


def parse_rating(reply: str) -> Rating:
    """The coach's score, held within 0 and 10. Raises `ValueError` where no score is stated, or two that differ.

    A number somewhere in the text is no score: "AUC 0.54" is a fault.
    """
    text = without_thinking(reply)
    value = _json_value(text, "score")
    if isinstance(value, dict):
        return Rating(_held(_number(value["score"])), _optional_text(value.get("analysis")))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is not None and not isinstance(value, list):
        return Rating(_held(_number(value)))
    if (alone := _SCORE_ALONE.fullmatch(text)) is not None:
        return Rating(_held(float(alone.group(1))))
    return Rating(_held(_one_of([float(m) for m in _SCORE_LINE.findall(text)], "score")))


def without_thinking(reply: str) -> str:
    """The reply after its thinking. Raises `ValueError` when the thinking never ends, or the reply is far too long."""
    if len(reply) > _MAX_CHARS:
        raise ValueError(f"the reply has {len(reply)} characters")
    before, closed, after = reply.rpartition("</think>")
    text = after if closed else before + after
    if "<think>" in text:
        raise ValueError("the thinking never ends")
    return text.strip()


def _json_value(text: str, key: str) -> Any:
    """The JSON that the text is, or the one object in it that holds `key`; None where there is neither."""
    fenced = _FENCE.match(text)
    whole = fenced.group(1) if fenced is not None else text
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
    try:
        value = decoder.decode(whole.strip())
    except json.JSONDecodeError:
        value = None
    except RecursionError as error:
        raise ValueError("the reply is nested too deeply") from error
    if isinstance(value, dict):
        if key not in value:
            raise ValueError(f'the object has no key "{key}"')
        return value
    if value is not None:
        return value
    found = [o for o in _objects(text, decoder) if key in o]
    if len(found) > 1 and any(o != found[0] for o in found):
        raise ValueError(f'several objects hold the key "{key}"')
    return found[0] if found else None


def _objects(text: str, decoder: json.JSONDecoder) -> list[dict[str, Any]]:
    """Every outermost JSON object in the text."""
    found, failed, at = [], 0, text.find("{")
    while at >= 0:
        if failed > _MAX_STRAY_BRACES:
            raise ValueError("the reply is full of braces that open nothing")
        try:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
        except json.JSONDecodeError:
            failed, end = failed + 1, at + 1
        except RecursionError as error:
            raise ValueError("the reply is nested too deeply") from error
        at = text.find("{", end)
    return found


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out and out[key] != value:
            raise ValueError(f'the key "{key}" has two values')
        out[key] = value
    return out


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _yes_or_no(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = _VERDICT_ALONE.fullmatch(value.strip()) if isinstance(value, str) else None
    if word is None:
        raise ValueError(f'"correct" must be yes or no, got {str(value)[:40]!r}')
    return word.group(1).lower() == "yes"


def _number(value: Any) -> float:
    if isinstance(value, str) and (alone := _SCORE_ALONE.fullmatch(value.strip())) is not None:
        return float(alone.group(1))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the score must be a number from 0 to 10, got {str(value)[:40]!r}")
    return float(value)


def _held(score: float) -> float:
    if not math.isfinite(score):
        raise ValueError("the score is not finite")
    return min(10.0, max(0.0, score))


def _confidence(value: Any) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(?:\.\d+)?\s*%?\s*", value):
        value = float(value.strip().rstrip("%"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        return None
    return float(value)


def _optional_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _one_of(values: Sequence[Any], what: str) -> Any:
    if not values:
        raise ValueError(f"there is no {what} in the reply")
    if any(v != values[0] for v in values):
        raise ValueError(f"the reply states more than one {what}")
    return values[0]
