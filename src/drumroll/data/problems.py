"""Procedurally generated problems for tiny models, and flawed teachers of them.

A problem belongs to the held-out split or to the training split by a hash of its text, so the two can never meet.
A teacher is *systematically* wrong in part of its demonstrations: a model that imitates it knows the right answer as
a minority opinion, which is a start that reinforcement learning can teach rather than merely sharpen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from drumroll.errors import DataError

Row = dict[str, Any]
HELD_OUT_SHARE = 5


def is_held_out(prompt: str) -> bool:
    """One problem in `HELD_OUT_SHARE` is held out, decided by its text alone."""
    return hashlib.sha256(prompt.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _stream(make: Callable[[random.Random], Row], split: str, seed: int) -> Iterator[Row]:
    """Endless problems of a split."""
    if split not in ("train", "held_out"):
        raise DataError(f"split '{split}' does not exist; problems have 'train' and 'held_out'.")
    rng = random.Random(f"{split}/{seed}")
    while True:
        row = make(rng)
        if is_held_out(row["prompt"]) == (split == "held_out"):
            yield row


def sums(split: str, seed: int, terms: int = 3, top: int = 9) -> Iterator[Row]:
    """`3+4+5=` → `12`. The flawed teacher forgets the last term."""

    def make(rng: random.Random) -> Row:
        numbers = [rng.randint(0, top) for _ in range(terms)]
        return {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers)), "flawed": str(sum(numbers[:-1]))}

    return _stream(make, split, seed)


def reversal(split: str, seed: int, shortest: int = 3, longest: int = 4, letters: str = "abcdefgh") -> Iterator[Row]:
    """`rev cab=` → `bac`. The flawed teacher copies the word."""

    def make(rng: random.Random) -> Row:
        word = "".join(rng.choice(letters) for _ in range(rng.randint(shortest, longest)))
        while word == word[::-1]:
            word = "".join(rng.choice(letters) for _ in range(rng.randint(shortest, longest)))
        return {"prompt": f"rev {word}=", "answer": word[::-1], "flawed": word}

    return _stream(make, split, seed)


def questions(split: str, seed: int, terms: int = 3, top: int = 9) -> Iterator[Row]:
    """`What is 3 + 4 - 5?` in words, for models that speak; the answer is a number."""

    def make(rng: random.Random) -> Row:
        numbers = [rng.randint(0, top) for _ in range(terms)]
        signs = [1, *(rng.choice((1, -1)) for _ in numbers[1:])]
        text = "".join(f" {'+' if s > 0 else '-'} {n}" for s, n in zip(signs, numbers, strict=True))[3:]
        total = sum(s * n for s, n in zip(signs, numbers, strict=True))
        return {"prompt": f"What is {text}? Reply with the result only.", "answer": str(total)}

    return _stream(make, split, seed)


TASKS: dict[str, Callable[..., Iterator[Row]]] = {"sums": sums, "reversal": reversal}


def demonstrations(split: str, seed: int, task: str, flawed: float, ramp: int = 0, **args: Any) -> Iterator[Row]:
    """Rows to imitate: a teacher that is systematically wrong in a share `flawed` of them, reached over `ramp` rows."""
    rng = random.Random(f"teacher/{task}/{seed}")
    for count, row in enumerate(TASKS[task](split, seed, **args)):
        share = flawed * min(1.0, count / ramp) if ramp else flawed
        yield {**row, "completion": row["flawed"] if rng.random() < share else row["answer"]}
