"""Equality of expressions by math-verify. Imported by pool workers; never call it where it cannot be killed."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

SECONDS = 2
"""For each of reading and comparing; a Python loop is stopped then, without the loss of a process."""

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)


class Unreadable(ValueError):
    """A text that math-verify makes nothing of, or not in time."""


@lru_cache(maxsize=4096)
def read(text: str) -> list[Any]:
    """A text as expressions; those read are kept, because the samples of a group have one answer to compare with."""
    expressions = parse(f"${text}$", parsing_timeout=SECONDS)
    if not expressions:
        raise Unreadable(text)
    return expressions


def equal_expressions(answer: str, gold: str) -> bool:
    """Whether both mean the same."""
    try:
        return verify(read(gold), read(answer), timeout_seconds=SECONDS)
    except (Unreadable, RecursionError, MemoryError):
        return False


read(r"\frac{1}{2} + \sqrt{x}")  # the first parse builds tables, before anyone's deadline counts
