"""Look-ups in long texts: among thousands of small letters stand one digit, one capital letter and one sign, which are to be named.

`python recipes/long-context/lookups.py FOLDER` writes the random model that `warm-start.yaml` begins with.
"""

from __future__ import annotations

import itertools
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from drumroll.data.split import Row, stream
from drumroll.models import tiny

HIDDEN = (string.digits, string.ascii_uppercase, "+-*/=<>()[]{}")
LETTERS = string.ascii_lowercase + "    "


def texts(split: str, seed: int, length: int, shortest: int = 0, ramp: int = 0) -> Iterator[Row]:
    """`pw 7agh tQ..p>k..?` → `7Q>`. Texts grow from `shortest` to `length` characters over the first `ramp` rows."""
    numbers = itertools.count()

    def make(rng: random.Random) -> Row:
        done = min(1.0, next(numbers) / ramp) if ramp else 1.0
        size = round(length * (shortest / length) ** (1 - done)) if ramp else length
        text, answer = rng.choices(LETTERS, k=size - 1), [rng.choice(kind) for kind in HIDDEN]
        for place, character in zip(rng.sample(range(len(text)), len(answer)), answer, strict=True):
            text[place] = character
        found = "".join(answer)
        return {"prompt": "".join(text) + "?", "answer": found, "completion": found}

    return stream(make, split, seed)


def found(completion: str, answer: str) -> float:
    """The share of the hidden characters that are named, in their order."""
    return sum(said == right for said, right in zip(completion, answer, strict=False)) / len(answer)


def write_model(folder: Path) -> None:
    """A random Llama of two layers that knows 16,384 positions."""
    module = tiny.random_model(0, hidden=64, layers=2, heads=4, key_value_heads=2)
    module.config.max_position_embeddings = 16384
    module.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
