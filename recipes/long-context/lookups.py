"""Look-ups in long texts: among thousands of letters stands one digit, which is to be named.

`python recipes/long-context/lookups.py FOLDER` writes the random model that `warm-start.yaml` begins with.
"""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from drumroll.data.split import Row, stream
from drumroll.models import tiny

LETTERS = string.ascii_lowercase + "    "


def texts(split: str, seed: int, length: int, shortest: int | None = None, flawed: float = 0.0) -> Iterator[Row]:
    """`pw agh t7p k?` → `7`. Texts have `length` characters, or log-uniformly many from `shortest` on.

    A share `flawed` of the completions names the next digit instead.
    """

    def make(rng: random.Random) -> Row:
        size = round(length * ((shortest or length) / length) ** rng.random())
        text, digit = rng.choices(LETTERS, k=size - 1), rng.randrange(10)
        text[rng.randrange(len(text))] = str(digit)
        said = (digit + 1) % 10 if rng.random() < flawed else digit
        return {"prompt": "".join(text) + "?", "answer": str(digit), "completion": str(said)}

    return stream(make, split, seed)


def write_model(folder: Path) -> None:
    """Write a random Llama of two layers for 16,384 positions, with rotary frequencies low enough to see that far."""
    module = tiny.random_model(0, hidden=64, layers=2, heads=4, key_value_heads=2)
    module.config.max_position_embeddings = 16384
    module.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e8}
    module.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
