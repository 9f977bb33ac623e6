"""Procedurally generated problems, and flawed teachers of them, so that a run in many domains needs no download.

A teacher is *systematically* wrong in part of its demonstrations: a model that imitates it knows the right answer as
a minority opinion, which is a start that reinforcement learning can teach rather than merely sharpen. Here is arithmetic;
`code`, `following` and `choice` beside this file are other domains, each in a form for the built-in tiny model and in words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from drumroll.data.choice import choices, quizzes
from drumroll.data.code import functions, programs
from drumroll.data.following import instructions, orders
from drumroll.data.split import Row, stream
from drumroll.errors import DataError, did_you_mean

__all__ = [
    "choices", "demonstrations", "functions", "instructions", "orders", "preferences", "programs", "questions", "quizzes", "reversal", "sums",
]  # fmt: skip


def sums(split: str, seed: int, terms: int = 3, top: int = 9) -> Iterator[Row]:
    """`3+4+5=` → `12`. The flawed teacher forgets the last term."""

    def make(rng: random.Random) -> Row:
        numbers = [rng.randint(0, top) for _ in range(terms)]
        return {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers)), "flawed": str(sum(numbers[:-1]))}

    return stream(make, split, seed)


def reversal(split: str, seed: int, shortest: int = 3, longest: int = 4, letters: str = "abcdefgh") -> Iterator[Row]:
    """`rev cab=` → `bac`. The flawed teacher copies the word."""

    def make(rng: random.Random) -> Row:
        word = "".join(rng.choice(letters) for _ in range(rng.randint(shortest, longest)))
        while word == word[::-1]:
            word = "".join(rng.choice(letters) for _ in range(rng.randint(shortest, longest)))
        return {"prompt": f"rev {word}=", "answer": word[::-1], "flawed": word}

    return stream(make, split, seed)


def questions(split: str, seed: int, terms: int = 3, top: int = 9) -> Iterator[Row]:
    """`What is 3 + 4 - 5?` in words, for models that speak; the answer is a number. The flawed teacher forgets the last term."""

    def make(rng: random.Random) -> Row:
        numbers = [rng.randint(0, top) for _ in range(terms)]
        signs = [1, *(rng.choice((1, -1)) for _ in numbers[1:])]
        text = "".join(f" {'+' if s > 0 else '-'} {n}" for s, n in zip(signs, numbers, strict=True))[3:]
        parts = [s * n for s, n in zip(signs, numbers, strict=True)]
        prompt = f"What is {text}? Reply with the result only."
        return {"prompt": prompt, "answer": str(sum(parts)), "flawed": str(sum(parts[:-1]))}

    return stream(make, split, seed)


TASKS: dict[str, Callable[..., Iterator[Row]]] = {
    "sums": sums,
    "reversal": reversal,
    "programs": programs,
    "orders": orders,
    "choices": choices,
    "questions": questions,
    "functions": functions,
    "instructions": instructions,
    "quizzes": quizzes,
}
"""All generators by name: first those for the tiny model, then those in words."""


def demonstrations(split: str, seed: int, task: str, flawed: float, ramp: int = 0, **args: Any) -> Iterator[Row]:
    """Rows to imitate: a teacher that is systematically wrong in a share `flawed` of them, reached over `ramp` rows."""
    if task not in TASKS:
        raise DataError(f"there is no task '{task}'; choose one of {', '.join(TASKS)}.{did_you_mean(task, TASKS)}")
    return _teach(TASKS[task](split, seed, **args), random.Random(f"teacher/{task}/{seed}"), flawed, ramp)


def preferences(split: str, seed: int, task: str, wrong: float = 0.0, slips: float = 0.0, **args: Any) -> Iterator[Row]:
    """Pairs of the right answer and the flawed teacher's, which is chosen in a share `wrong` of them.

    In a share `slips` the wrong answer is a near miss of the right one.
    """
    if task not in TASKS:
        raise DataError(f"there is no task '{task}'; choose one of {', '.join(TASKS)}.{did_you_mean(task, TASKS)}")
    rng = random.Random(f"judge/{task}/{seed}")
    for row in TASKS[task](split, seed, **args):
        bad = _slip(row["answer"], rng) if slips and rng.random() < slips else row["flawed"]
        first, second = (bad, row["answer"]) if rng.random() < wrong else (row["answer"], bad)
        yield {**row, "chosen": first, "rejected": second}


def _slip(text: str, rng: random.Random) -> str:
    """A number at most 3 off; of other texts one edit away: a character too many, another, one too few, or two swapped."""
    while True:
        at, letter = rng.randrange(len(text)), rng.choice("abcdefgh")
        if text.isdigit():
            made = str(abs(int(text) + rng.randint(-3, 3)))
        else:
            edits = ((letter + text[at], 1), (letter, 1), ("", 1), (text[at : at + 2][::-1], 2))
            edit, length = rng.choice(edits)
            made = text[:at] + edit + text[at + length :]
        if made not in ("", text):
            return made


def _teach(rows: Iterator[Row], rng: random.Random, flawed: float, ramp: int) -> Iterator[Row]:
    for count, row in enumerate(rows):
        share = flawed * min(1.0, count / ramp) if ramp else flawed
        yield {**row, "completion": row["flawed"] if rng.random() < share else row["answer"]}
