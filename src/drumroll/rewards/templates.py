"""Questions to a judge, by name. A user's own is a text with {fields}, or a file that holds one.

Fields are `prompt`, `completion`, the row's columns and the reward's `args`. Only a name in braces is a field, so JSON in a
template stays as it is, and what is filled in is never searched for fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from drumroll.errors import ConfigError, DataError, did_you_mean

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Template:
    """A question, and what a number in its answer is out of."""

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
    """By name, from a file, or the text itself."""
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


def fill(text: str, fields: Mapping[str, Any]) -> str:
    """The question; a field that is not there is named."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in fields:
            raise DataError(f"the judge's template needs '{name}', but there is only {', '.join(sorted(fields))}.")
        return spelled(fields[name])

    return FIELD.sub(value, text)


def spelled(value: Any) -> str:
    """A value as a person would write it: a conversation turn by turn, a list point by point."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(turn, Mapping) and "role" in turn for turn in value):
            turns = [(str(turn["role"]), str(turn.get("content") or "")) for turn in value]
            return turns[0][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)
        return "\n".join(f"{number}. {spelled(each)}" for number, each in enumerate(value, 1))
    return str(value)
