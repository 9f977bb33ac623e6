r"""Where a completion states its final answer: \boxed{}, <answer>, "the answer is", the last formula or number.

Completions are hostile: every search here is linear in the text or looks at its end only.
"""

from __future__ import annotations

import re

TAIL = 2000
"""Characters at the end in which an answer without any mark is looked for."""
BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{|\\[{}]|[{}]")
ANSWER_IS = re.compile(r"\banswer[\s*_]{0,8}(?:is|are|=|:)[\s*_:]{0,8}", re.IGNORECASE)
FORMULA = re.compile(
    r"\$\$([^$]{1,500})\$\$|\$([^$\n]{1,500})\$|\\\(((?:(?!\\\)).){1,500})\\\)|\\\[((?:(?!\\\]).){1,500})\\\]", re.DOTALL
)
NUMBER = re.compile(
    r"(?<![A-Za-z\d.])(?:(?<![)\]}])[-+−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d{1,3})?(?:\s?/\s?\d+)?(?:\s?\\?%)?",
    re.ASCII,
)
SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\s(?:because|since|which|as)\s")


def after_thinking(text: str) -> str:
    """What follows the last </think>; all of it if there is none."""
    return text.rpartition("</think>")[2]


def split_thinking(text: str) -> tuple[str, str]:
    """The thoughts before the last </think>, without their opening tag, and what follows it; no thoughts without a tag."""
    thoughts, _, final = text.rpartition("</think>")
    return thoughts.removeprefix("<think>"), final


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{}, the innermost if they are nested; a box that is never closed is none."""
    opened: list[int] = []  # where each open brace's content begins; -1 for one that is no box
    start, end = -1, 0
    for brace in BRACES.finditer(text):
        piece = brace[0]
        if piece == "}":
            began = opened.pop() if opened else -1
            if began > start:
                start, end = began, brace.start()
        elif piece == "{":
            opened.append(-1)
        elif piece not in ("\\{", "\\}"):
            opened.append(brace.end())
    return text[start:end].strip() if start >= 0 else None


def tagged(text: str, tag: str) -> str | None:
    """What is in the last <tag>, which may be cut off."""
    _, opening, inside = text.rpartition(f"<{tag}>")
    return inside.partition(f"</{tag}>")[0].strip() if opening else None


def stated(text: str) -> str | None:
    """What follows the last "answer is" or "answer:", or a #### as in GSM8K, to the end of the line."""
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip()
    last = None
    for last in ANSWER_IS.finditer(text):  # noqa: B007  only the last counts
        pass
    if last is None:
        return None
    line = text[last.end() : last.end() + TAIL].strip().partition("\n")[0]
    formula = FORMULA.search(line)
    if formula is not None:
        return _inside(formula)
    end = SENTENCE_END.search(line)
    return line[: end.start()].strip(" *_") if end else line.strip(" *_")


def last_formula_or_number(text: str) -> str | None:
    """The last $formula$ or number at the end of the text, whichever ends later."""
    formula = number = None
    for formula in FORMULA.finditer(text, max(0, len(text) - TAIL)):  # noqa: B007
        pass
    for number in NUMBER.finditer(text, max(0, len(text) - TAIL)):  # noqa: B007
        pass
    if formula is not None and (number is None or number.end() <= formula.end()):
        return _inside(formula)
    return number[0] if number is not None else None


def final_answer(text: str) -> str | None:
    """What the text states as its answer, or None; a box that was cut off states nothing."""
    text = after_thinking(text)
    boxed = last_boxed(text)
    if boxed or "\\boxed{" in text:
        return boxed
    return tagged(text, "answer") or stated(text) or last_formula_or_number(text)


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
