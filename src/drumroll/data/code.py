"""Small Python functions to write, with hidden tests.

`answer` is a program that passes, `tests` are calls that decide, and `prefix` is what a completion is appended to before
it runs (empty when the completion is the whole program). The flawed teacher returns what one example shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drumroll.data.split import Row, stream

NAME = "f"
PREFIX = f"def {NAME}(x): return "
HIDDEN = (-40, -3, 0, 4, 9, 12, 50)


@dataclass(frozen=True)
class _Kind:
    """A family of functions with one constant."""

    body: str
    words: str
    run: Callable[[int, int], int]


_KINDS = (
    _Kind("x+{c}", "returns x plus {c}", lambda x, c: x + c),
    _Kind("x-{c}", "returns x minus {c}", lambda x, c: x - c),
    _Kind("x*{c}", "returns x multiplied by {c}", lambda x, c: x * c),
    _Kind("{c}-x", "returns {c} minus x", lambda x, c: c - x),
)
_WORDED = (
    *_KINDS,
    _Kind("x%{c}", "returns the remainder of x divided by {c}", lambda x, c: x % c),
    _Kind("max(x,{c})", "returns the larger of x and {c}", max),
    _Kind("min(x,{c})", "returns the smaller of x and {c}", min),
)


def _tests(kind: _Kind, constant: int) -> list[Row]:
    return [{"call": {"function": NAME, "args": [x], "expected": kind.run(x, constant)}} for x in HIDDEN]


def programs(split: str, seed: int, top: int = 5) -> Iterator[Row]:
    """`f(2)=5 f(4)=7 f(x)=` → `x+3`, for the tiny model: two examples, and the body to write."""

    def make(rng: random.Random) -> Row:
        kind, constant = rng.choice(_KINDS), rng.randint(2, top)
        low, high = sorted(rng.sample(range(1, 8), 2))
        shown = [(x, kind.run(x, constant)) for x in (low, high)]
        return {
            "prompt": "".join(f"{NAME}({x})={y} " for x, y in shown) + f"{NAME}(x)=",
            "prefix": PREFIX,
            "answer": kind.body.format(c=constant),
            "flawed": str(shown[0][1]),
            "tests": _tests(kind, constant),
        }

    return stream(make, split, seed)


def functions(split: str, seed: int, top: int = 20) -> Iterator[Row]:
    """`Write a Python function f(x) that returns x plus 3.` in words, for models that speak."""

    def make(rng: random.Random) -> Row:
        kind, constant = rng.choice(_WORDED), rng.randint(2, top)
        x = rng.randint(1, 9)
        y = kind.run(x, constant)
        said = kind.words.format(c=constant)
        return {
            "prompt": f"Write a Python function {NAME}(x) that {said}. For example, {NAME}({x}) is {y}. Reply with the code only.",
            "prefix": "",
            "answer": f"def {NAME}(x):\n    return {kind.body.format(c=constant)}",
            "flawed": f"def {NAME}(x):\n    return {y}",
            "tests": _tests(kind, constant),
        }

    return stream(make, split, seed)
