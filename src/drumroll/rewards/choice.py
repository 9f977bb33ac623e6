r"""`choice`: which option of a multiple-choice question does the completion name? (B), B., answer: B, \boxed{B}, its text."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from drumroll.rewards import REWARDS
from drumroll.rewards.extraction import TAIL, after_thinking, last_boxed, stated, tagged
from drumroll.rewards.text import words_of

LETTERS = string.ascii_uppercase[:8]
"""The letters that count where the options are not given."""
LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]{0,200})\}")
ALONE = re.compile(r"\W*([A-Za-z])\W*", re.ASCII)
FIRST = re.compile(r"\W*(?:(?:option|choice|letter)\W+)?(?:([A-Z])(?![\w'])|[(\[]([a-z])[)\]])", re.ASCII)
MARKED = re.compile(
    r"[(\[{]([A-Za-z])[)\]}]|\*\*([A-Z])\b[^*\n]{0,80}\*\*|(?:^|\n)\s{0,8}([A-Z])(?:[).:]|\s*$)|\b(?:[Oo]ption|[Cc]hoice)(?:\sis)?:?\s([A-Z])\b",
    re.ASCII | re.MULTILINE,
)

Options = Sequence[str] | Mapping[str, str]


@REWARDS.register("choice")
def choice(completion: str, answer: str | int, options: Options | None = None) -> float:
    """1 when the completion names the right option; `answer` is its letter, its number from 0, or its text."""
    texts = _texts(options)
    wanted, named = _wanted(answer, texts), letter_of(completion, texts)
    return float(wanted is not None and wanted == named)


def letter_of(completion: str, texts: Mapping[str, str]) -> str | None:
    """The letter that the completion names; None if it names none or several."""
    text = after_thinking(completion)
    for found in (last_boxed(text), tagged(text, "answer"), stated(text)):
        if found and (letter := _in_statement(found[:TAIL], texts)):
            return letter
    tail = text[-TAIL:].strip()
    if alone := ALONE.fullmatch(tail):
        return _known(alone[1], texts)
    marked = {_known(next(filter(None, m.groups())), texts) for m in MARKED.finditer(tail)} - {None}
    if len(marked) == 1:
        return marked.pop()
    return None if marked else _by_text(tail, texts)


def _in_statement(text: str, texts: Mapping[str, str]) -> str | None:
    """The option that a short statement such as `B`, `(b) Paris` or `Paris` names."""
    text = LATEX.sub(r"\1", text).strip()
    if letter := _equal_text(text, texts):
        return letter
    if alone := ALONE.fullmatch(text):
        return _known(alone[1], texts)
    if first := FIRST.match(text):
        return _known(first[1] or first[2], texts)
    return _by_text(text, texts)


def _equal_text(text: str, texts: Mapping[str, str]) -> str | None:
    said = words_of(text)
    return next((letter for letter, option in texts.items() if said and words_of(option) == said), None)


def _by_text(text: str, texts: Mapping[str, str]) -> str | None:
    """The only option whose words occur in the text."""
    said = f" {words_of(text)} "
    named = [letter for letter, option in texts.items() if words_of(option) and f" {words_of(option)} " in said]
    return named[0] if len(named) == 1 else None


def _known(letter: str, texts: Mapping[str, str]) -> str | None:
    return letter.upper() if letter.upper() in (texts or LETTERS) else None


def _texts(options: Options | None) -> dict[str, str]:
    """Options by letter, from a list or a mapping."""
    if options is None:
        return {}
    pairs = options.items() if isinstance(options, Mapping) else zip(string.ascii_uppercase, options, strict=False)
    return {str(letter).upper(): str(text) for letter, text in pairs}


def _wanted(answer: str | int, texts: Mapping[str, str]) -> str | None:
    if isinstance(answer, int):
        return string.ascii_uppercase[answer] if 0 <= answer < 26 else None
    alone = ALONE.fullmatch(answer)
    return _known(alone[1], texts) if alone else _equal_text(answer, texts)
