r"""`math`: is the final answer the right one? Strings and numbers are compared here; the rest by math-verify in the pool.

math-verify (and sympy below it) can be kept busy for hours by a short text: it must only ever run on the main thread of a
process that can be killed, and only on short texts. What cannot be checked in its CPU time is wrong.
"""

from __future__ import annotations

import re

from drumroll.processes.deadline import CpuTimeExceeded
from drumroll.rewards import REWARDS, Processes
from drumroll.rewards.extraction import final_answer, last_boxed
from drumroll.rewards.numbers import read

LONGEST = 1000
"""Characters beyond which an answer is only compared as text."""
DEEPEST = 40
"""Brackets within brackets beyond which it is only compared as text."""
EQUAL = "drumroll.rewards.symbolic:equal_expressions"
SECONDS = 10.0
"""CPU time after which the process is stopped; `symbolic` limits each part of the work to less."""

DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|\\[!,;: ]|\^\s?\{?\s?\\circ\s?\}?|°|\$|\\\(|\\\)|\\\[|\\\]"
)
WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}")
SPACES = re.compile(r"\s+|~")
LOOSE = re.compile(r"(?<!\w) | (?!\w)")
"""Spaces that divide nothing: `x + 1` is `x+1`, but `1 2` is not `12`."""
SPELLINGS = {"−": "-", "–": "-", "\u00a0": " ", "\\$": "", "\\%": "%", "{,}": ",", "\\dfrac": "\\frac", "\\tfrac": "\\frac"}


def plain(text: str) -> str:
    """An answer without what does not change its meaning: layout, dollar signs, degrees, a full stop."""
    for old, new in SPELLINGS.items():
        text = text.replace(old, new)
    text = DROPPED.sub("", WORDS.sub(r" \1", text))
    return SPACES.sub(" ", text).strip(" *_`").removesuffix(".").strip()


def quick(answer: str, gold: str) -> bool | None:
    """Equal or not, by text and by exact numbers; None where that does not tell."""
    ours, theirs = LOOSE.sub("", answer), LOOSE.sub("", gold)
    if ours == theirs:
        return True
    if ours.isalpha() and theirs.isalpha() and min(len(ours), len(theirs)) > 2:
        return ours.casefold() == theirs.casefold()  # words, which must not be read as products of letters
    a, b = read(answer), read(gold)
    if a is not None and b is not None:
        return a.same(b)
    if b is not None and not any(c.isdigit() or c == "\\" for c in answer):
        return False  # words are no rational number
    return None


def checkable(text: str) -> bool:
    """Short and shallow enough for a parser."""
    depth = deepest = 0
    for c in text[: LONGEST + 1]:
        depth += (c in "([{") - (c in ")]}")
        deepest = max(deepest, depth)
    return len(text) <= LONGEST and deepest <= DEEPEST


@REWARDS.register("math", requires=("math_verify", "math"))
async def math(completion: str, answer: object, processes: Processes) -> float:
    r"""1 when the final answer (\boxed{}, <answer>, "the answer is", the last formula or number) equals `answer`."""
    gold = str(answer)
    found, wanted = final_answer(completion), last_boxed(gold) or gold.rpartition("####")[2]
    if found is None:
        return 0.0
    found, wanted = plain(found[: 10 * LONGEST]), plain(wanted)
    equal = quick(found, wanted)
    if equal is None and checkable(found) and checkable(wanted):
        try:
            equal = await processes.run(EQUAL, {"answer": found, "gold": wanted}, SECONDS, cpu=True)
        except CpuTimeExceeded:
            return 0.0
    return float(bool(equal))
