"""Named templates of questions to a judge. A user's own template is a text with {fields}, or a file that holds one.

Fields are `prompt`, `completion`, the row's columns and the reward's `args`. Only a name in braces is a field, so JSON
in a template stays unchanged. Inserted values are never searched for fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from drumroll.errors import ConfigError, DataError, did_you_mean

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
SHORTENED = ("completion", "first", "second")
"""Fields that are shortened if a question is too long for the judge."""


class Question(str):
    """A filled template that records the positions of its shortened fields."""

    spans: tuple[tuple[int, int], ...] = ()


def _cut(text: str, spans: Sequence[tuple[int, int]], keep: int) -> str:
    """Keep only `keep` characters of each span, half from its beginning and half from its end, with a mark between."""
    parts, at = [], 0
    for start, end in spans:
        if end - start > keep:
            head, tail = start + (keep + 1) // 2, end - keep // 2
            parts += [text[at:head], f"\n[... {tail - head} characters left out ...]\n"]
            at = tail
    return "".join([*parts, text[at:]])


def fitting(question: str, size: Callable[[str], int], limit: int) -> str | None:
    """Shorten the question to at most `limit` by `size`: first the completion, then, if that is not enough, the whole text.

    Returns None if even that does not fit.
    """
    if size(question) <= limit:
        return question
    whole = ((0, len(question)),)
    for spans in (getattr(question, "spans", ()), whole):
        low, high = -1, max((end - start for start, end in spans), default=0)  # low fits or is -1; high does not fit
        while high - low > 1:
            keep = (low + high) // 2
            low, high = (keep, high) if size(_cut(question, spans, keep)) <= limit else (low, keep)
        if low >= 0:
            return _cut(question, spans, low)
    return None


@dataclass(frozen=True)
class Template:
    """A question, and the full mark of a number in its answer."""

    text: str
    scale: float | None = None


TEMPLATES = {
    "binary": Template("Question: {prompt}\nAnswer: {completion}\nIs the answer right? Say yes or no."),
    "reference": Template(
        "Question: {prompt}\nRight answer: {answer}\nGiven answer: {completion}\n"
        "Does the given answer say the same as the right answer? Say yes or no."
    ),
    "score": Template(
        "Question: {prompt}\nAnswer: {completion}\n"
        "How good is the answer, from 0 (useless or wrong) to 10 (could not be better)? Say the number only, for example: 7/10.",
        scale=10,
    ),
    "rubric": Template(
        "Question: {prompt}\nAnswer: {completion}\nGrade the answer by this rubric:\n{rubric}\n"
        'Give each point of the rubric 0 to 10. End with a line of JSON only, for example: {"scores": [7, 10]}',
        scale=10,
    ),
    "pairwise": Template(
        "Question: {prompt}\n\n[Answer A]\n{first}\n\n[Answer B]\n{second}\n\n"
        "Which answer is better? Do not mind their order or length. End with [[A]], [[B]], or [[C]] if they are equally good."
    ),
}


@cache
def template(spec: str) -> Template:
    """Return a template by name, from a file, or from the text itself."""
    if spec in TEMPLATES:
        return TEMPLATES[spec]
    if FIELD.search(spec):
        return Template(spec)
    try:
        text = Path(spec).expanduser().read_text("utf-8")
    except (OSError, ValueError):
        raise ConfigError(
            f"reward 'judge': template '{spec:.60}' is neither a name ({', '.join(TEMPLATES)}), nor a file, nor a text with "
            f"{{prompt}} and {{completion}}.{did_you_mean(spec, TEMPLATES)}"
        ) from None
    if not FIELD.search(text):
        raise ConfigError(f"reward 'judge': the template {spec} names no field such as {{prompt}} or {{completion}}.")
    return Template(text)


def fill(text: str, fields: Mapping[str, Any]) -> Question:
    """Fill in the fields; raise a DataError that names a missing field."""
    parts, spans, at = FIELD.split(text), [], 0
    for place, part in enumerate(parts):
        if place % 2:
            if part not in fields:
                raise DataError(f"the judge's template needs '{part}', but there is only {', '.join(sorted(fields))}.")
            parts[place] = spelled(fields[part])
            if part in SHORTENED:
                spans.append((at, at + len(parts[place])))
        at += len(parts[place])
    question = Question("".join(parts))
    question.spans = tuple(spans)
    return question


def spelled(value: Any) -> str:
    """Format a value as a person would write it: a conversation turn by turn, a list point by point."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(turn, Mapping) and "role" in turn for turn in value):
            turns = [(str(turn["role"]), str(turn.get("content") or "")) for turn in value]
            return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)
        return "\n".join(f"{number}. {spelled(each)}" for number, each in enumerate(value, 1))
    return str(value)
