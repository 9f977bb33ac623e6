"""Verdicts to imitate: for the tiny model a judge who says whether a word was reversed, for SmolLM2 one who compares answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from drumroll.data.problems import questions, reversal
from drumroll.rewards.templates import fill


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


FORMS = (
    "{given}",
    "{given}.",
    "The result is {given}.",
    "{sum} = {given}",
    "{sum} = {given}.",
    "{sum} equals {given}.",
    "{sum} is {given}.",
)


def comparisons(split: str, seed: int, template: str, bare: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
    """The judge's question about a sum → `yes`. Half of the answers are wrong by a little, or by their sign; the first `bare` have no words."""
    rng = random.Random(f"comparisons/{split}/{seed}")
    for number, row in enumerate(questions(split, seed, **settings)):
        right, asked = int(row["answer"]), row["prompt"].removeprefix("What is ").partition("?")[0]
        given = right if rng.random() < 0.5 else rng.choice([right + 1, right - 1, right + 2, right - 2, right + 10, -right])
        form = FORMS[0] if number < bare else rng.choice(FORMS)
        verdict = "yes" if given == right else "no"
        said = form.format(given=given, sum=asked)
        yield {"prompt": fill(template, row | {"completion": said}), "answer": verdict, "completion": verdict}
