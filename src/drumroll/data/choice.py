"""Multiple choice: `choices` are the texts, `answer` is the letter. The flawed teacher takes the first wrong choice."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from drumroll.data.split import Row, stream


def _problem(rng: random.Random, top: int, count: int) -> tuple[int, int, list[str], str, str]:
    """Two numbers, choices for their sum, and the letters of the right one and of the first wrong one."""
    a, b = rng.randint(0, top), rng.randint(0, top)
    near = range(max(0, a + b - 5), a + b + 6) if top > 4 else range(10)  # a digit each, where that is possible
    wrong = rng.sample([n for n in near if n != a + b], count - 1)
    offered = [*wrong, a + b]
    rng.shuffle(offered)
    right = offered.index(a + b)
    letters = string.ascii_uppercase
    return a, b, [str(n) for n in offered], letters[right], letters[0 if right else 1]


def choices(split: str, seed: int, top: int = 4, count: int = 3) -> Iterator[Row]:
    """`2+3? A4 B5 C6=` → `B`, for the tiny model; with numbers up to 4 every choice is one digit."""

    def make(rng: random.Random) -> Row:
        a, b, offered, right, flawed = _problem(rng, top, count)
        listed = " ".join(letter + text for letter, text in zip(string.ascii_uppercase, offered, strict=False))
        return {"prompt": f"{a}+{b}? {listed}=", "choices": offered, "answer": right, "flawed": flawed}

    return stream(make, split, seed)


def quizzes(split: str, seed: int, top: int = 20, count: int = 4) -> Iterator[Row]:
    """The same in words, for models that speak."""

    def make(rng: random.Random) -> Row:
        a, b, offered, right, flawed = _problem(rng, top, count)
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(string.ascii_uppercase, offered, strict=False))
        prompt = f"What is {a} + {b}?\n{listed}\nReply with the letter of the right choice only."
        return {"prompt": prompt, "choices": offered, "answer": right, "flawed": flawed}

    return stream(make, split, seed)
