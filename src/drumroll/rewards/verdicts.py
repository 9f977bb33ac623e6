"""Parses a judge's answer into a number from 0 to 1, or into the better of two.

Tolerant of the form; None if there is no verdict.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

KEYS = ("verdict", "scores", "score", "rating", "grade", "correct", "winner", "answer", "result")
THOUGHT = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
MARKED = re.compile(r"\[\[\s*([^\[\]]+?)\s*\]\]")
NUMBER = r"[-+]?\d+(?:\.\d+)?"
FRACTION = re.compile(rf"({NUMBER})\s*(?:/|out of)\s*({NUMBER})")
PERCENT = re.compile(rf"({NUMBER})\s*%")
NAMED = re.compile(rf"\b(?:score|rating|grade|verdict)\b\W*(?:is\W*)?({NUMBER})", re.IGNORECASE)
LEADING = re.compile(rf"\W*?({NUMBER})(?![\w./])")
WORDS = re.compile(r"\b(not (?:correct|right|true)|incorrect|wrong|correct|right|yes|no|true|false)\b", re.IGNORECASE)
GOOD = {"yes", "true", "correct", "right"}
SIDES = re.compile(
    r"\b(?:answer|response|assistant|option)\s+([AB])\b|(?<![\w'])([AB])(?![\w'])|\b(tie|equal(?:ly good)?)\b", re.IGNORECASE
)


def verdict(text: str, scale: float | None = None) -> float | None:
    """Parse a score from 0 to 1: JSON, [[marks]], 7/10, 70%, a number (out of `scale`, or of 1), yes or no."""
    text = THOUGHT.sub("", text).strip()
    for value in _objects(text):
        if (found := _of_json(value, scale)) is not None:
            return found
    if marked := MARKED.findall(text):
        return _of_text(marked[-1], scale)
    return _of_text(text, scale)


def _of_text(text: str, scale: float | None) -> float | None:
    if found := FRACTION.findall(text):
        part, whole = map(float, found[-1])
        return _within(part / whole) if whole > 0 else None
    if found := PERCENT.findall(text):
        return _within(float(found[-1]) / 100)
    if number := (LEADING.match(text) or NAMED.search(text)):
        return _scaled(float(number[1]), scale)
    first = WORDS.match(text.lstrip("*_#\"'` "))
    words = WORDS.findall(text)
    if first or words:
        return float((first[1] if first else words[-1]).lower() in GOOD)
    return None


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects in a text, the last one first."""
    decoder = json.JSONDecoder()
    for place in reversed([match.start() for match in re.finditer(r"\{", text)]):
        try:
            yield decoder.raw_decode(text, place)[0]
        except (ValueError, RecursionError):
            continue


def _of_json(value: Any, scale: float | None) -> float | None:
    if isinstance(value, dict):
        found = next((value[key] for key in KEYS if key in value), None)
        return None if found is None else _of_json(list(found.values()) if isinstance(found, dict) else found, scale)
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return _scaled(float(value), scale)
    if isinstance(value, list):
        parts = [_of_json(each, scale) for each in value]
        known = [part for part in parts if part is not None]
        return sum(known) / len(known) if known and len(known) == len(parts) else None
    return _of_text(value.strip(), scale) if isinstance(value, str) else None


def _scaled(number: float, scale: float | None) -> float | None:
    """Divide the number by the scale; without a scale, a number above 1 is no verdict."""
    if scale is not None:
        return _within(number / scale)
    return number if 0 <= number <= 1 else None


def _within(number: float) -> float | None:
    return min(1.0, max(0.0, number)) if math.isfinite(number) else None


def winner(text: str) -> str | None:
    """Parse `A`, `B` or `tie`: from JSON, from a [[mark]], or the last one named."""
    text = THOUGHT.sub("", text).strip()
    for value in _objects(text):
        if isinstance(value, dict) and (found := next((value[key] for key in KEYS if key in value), None)) is not None:
            return _side(str(found))
    marked = MARKED.findall(text)
    return _side(marked[-1]) if marked else _last_side(text)


def _side(said: str) -> str | None:
    if said.strip().upper() in ("A", "B"):
        return said.strip().upper()
    return "tie" if said.strip().upper() == "C" else _last_side(said)


def _last_side(text: str) -> str | None:
    """Return the last side named with its word or as a capital letter, or a tie; the article "a" does not count."""
    named = [m for m in SIDES.finditer(text) if m[1] or m[3] or m[2].isupper()]
    if not named:
        return None
    last = named[-1]
    return "tie" if last[3] else (last[1] or last[2]).upper()
