"""Equality of expressions by math-verify. Imported by pool workers; never call it where it cannot be killed."""

from __future__ import annotations

import logging
from functools import lru_cache
from math import isfinite
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Float, Integer, Rational

from drumroll.processes.deadline import cpu_limit

SECONDS = 2.0
"""CPU time for each of reading an answer, reading the gold answer, and comparing them in either way.

Each has its own, so that it does not matter which of them this process has read before.
"""

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)


library: Any = latex2sympy2
Parser: Any = library.PSParser
slow_number = library._Latex2Sympy.parse_number


class TwoStageParser(Parser):
    """math-verify's parser, which tries ANTLR's quick prediction first: it finds the same tree, or fails, several times faster."""

    def math(self) -> Any:
        """The whole text."""
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return super().math()
        except Exception:
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return super().math()


def quick_number(self: Any, text: str) -> Any:
    """Integers at once; sympy would run Python's own parser for each."""
    return Integer(int(text)) if text.isascii() and text.isdigit() and len(text) < 1000 else slow_number(self, text)


library.PSParser, library._Latex2Sympy.parse_number = TwoStageParser, quick_number


class Unreadable(ValueError):
    """A text that math-verify makes nothing of."""


@lru_cache(maxsize=4096)
def read(text: str) -> list[Any]:
    """A text as expressions; those read are kept, because the samples of a group have one answer to compare with."""
    expressions = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=0)
    if not expressions:
        raise Unreadable(text)
    return expressions


def decide(one: Any, other: Any) -> bool | None:
    """Equal if their difference expands to 0, and not if they differ at some point; None where only math-verify can tell.

    Most pairs are decided here, several times faster than by simplifying. Decimals may have been rounded, so they must differ
    widely; and never a hundredfold, for one may be a percentage.
    """
    if not all(isinstance(e, Expr) for e in (one, other)) or one.free_symbols != other.free_symbols:
        return None
    point = {symbol: Rational(3 * n + 8, 7) for n, symbol in enumerate(sorted(one.free_symbols, key=str))}
    try:
        a, b = complex(one.evalf(subs=point)), complex(other.evalf(subs=point))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    gap, (small, large) = abs(a - b), sorted((abs(a), abs(b)))
    least = 1e-3 * large + 1e-3 if one.has(Float) or other.has(Float) else 1e-9 * large
    if isfinite(gap) and gap > least:
        return None if 99 * small < large < 101 * small else False
    return True if (one - other).doit().expand() == 0 else None


def equal_expressions(answer: str, gold: str) -> bool:
    """Whether both mean the same; `CpuTimeExceeded` where it takes too long to tell."""
    try:
        with cpu_limit(SECONDS):
            ours = read(answer)
        with cpu_limit(SECONDS):
            theirs = read(gold)
        with cpu_limit(SECONDS):
            equal = decide(ours[0], theirs[0])
        if equal is None:
            with cpu_limit(SECONDS):
                equal = verify(theirs, ours, timeout_seconds=0)
        return equal
    except (Unreadable, RecursionError, MemoryError):
        return False


read(r"\frac{1}{2} + \sqrt{x}")  # the first parse builds tables, before anyone's deadline counts
