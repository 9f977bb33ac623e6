r"""Numbers as people write them, read exactly: 1,234.50, -3/4, \frac{3}{4}, 1 1/2, 50%, 2e-3, 3 \times 10^{8}.

Only short texts with small exponents are read, so that no text can make a number that takes long to compute.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 200
"""Characters beyond which a text is not read as a number."""
DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
FRACTION = (
    r"(?:(?P<mixed>\d+)\s?)?\\frac\s?(?:\{\s?(?P<t1>-?\d+)\s?\}|(?P<t2>\d))\s?(?:\{\s?(?P<b1>-?\d+)\s?\}|(?P<b2>\d))"
    r"|(?P<whole>\d+)\s(?P<t3>\d+)\s?/\s?(?P<b3>\d+)"
)
POWER = r"[eE](?P<e>[-+]?\d{1,3})|\s?(?:\\times|\\cdot|\*|×|x)\s?10\s?\^\s?\{?\s?(?P<ten>[-+]?\d{1,3})\s?\}?"
SHAPES = re.compile(
    rf"(?P<sign>[-+]?)\s?(?:{FRACTION}|(?P<top>{DECIMAL})\s?/\s?(?P<bottom>{DECIMAL})|(?P<decimal>{DECIMAL})(?:{POWER})?)"
    r"(?P<percent>\s?%|\s?percent)?(?P<unit>\s[a-zA-Z]{2,}\.?(?: [a-zA-Z]+){0,2})?",
    re.ASCII,
)
NO_UNITS = frozenset(
    [
        "pi",
        "sqrt",
        "sin",
        "cos",
        "tan",
        "log",
        "ln",
        "exp",
        "mod",
        "or",
        "and",
        "to",
        "hundred",
        "thousand",
        "million",
        "billion",
        "trillion",
        "dozen",
        "half",
        "third",
        "quarter",
    ]
)
NAMED = re.compile(r"^[A-Za-z]\w{0,2}\s?=\s?", re.ASCII)


class Value:
    """An exact number; of a percentage both readings are kept, 50 and 1/2."""

    def __init__(self, number: Fraction, percent: bool) -> None:
        self.number, self.percent = number, percent

    def same(self, other: Value) -> bool:
        """Equal; where one of them only is a percentage, by either reading."""
        if self.percent == other.percent:
            return self.number == other.number
        plain, share = (other.number, self.number) if self.percent else (self.number, other.number)
        return plain in (share, share / 100)


def read(text: str) -> Value | None:
    """The number that a text is, units aside; None if it is something else."""
    if len(text) > LONGEST:
        return None
    found = SHAPES.fullmatch(NAMED.sub("", text))
    if found is None or not NO_UNITS.isdisjoint((found["unit"] or "").lower().replace(".", " ").split()):
        return None
    try:
        number = _fraction(found)
    except (ZeroDivisionError, ValueError):
        return None
    return Value(-number if found["sign"] == "-" else number, found["percent"] is not None)


def _fraction(found: re.Match[str]) -> Fraction:
    if found["decimal"]:
        return _decimal(found["decimal"]) * Fraction(10) ** int(found["e"] or found["ten"] or 0)
    if found["top"]:
        return _decimal(found["top"]) / _decimal(found["bottom"])
    top, bottom = found["t1"] or found["t2"] or found["t3"], found["b1"] or found["b2"] or found["b3"]
    return int(found["mixed"] or found["whole"] or 0) + Fraction(int(top), int(bottom))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))
