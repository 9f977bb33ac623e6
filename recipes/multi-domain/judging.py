"""Verdicts to imitate: a judge for the tiny model, who says whether a word was reversed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from drumroll.data.problems import reversal


def verdicts(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """`judge rev cab=bac?` → `yes`. Half of the answers are wrong: copied, cut, stirred, or with a letter changed."""
    rng = random.Random(f"verdicts/{split}/{seed}")
    for row in reversal(split, seed):
        right = rng.random() < 0.5
        answer = row["answer"] if right else _spoiled(row["answer"], row["flawed"], rng)
        verdict = "yes" if answer == row["answer"] else "no"
        yield {"prompt": f"judge {row['prompt']}{answer}?", "answer": verdict, "completion": verdict}


def _spoiled(right: str, copied: str, rng: random.Random) -> str:
    letters = list(right)
    rng.shuffle(letters)
    changed = rng.randrange(len(right))
    other = right[:changed] + rng.choice("abcdefgh") + right[changed + 1 :]
    return rng.choice([copied, copied, right[:-1], right[1:], "".join(letters), other, other, right + rng.choice("abcdefgh")])
