"""Rows for environments: seeds, of which each split has its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from drumroll.data.split import Row, check_split, is_held_out


def seeds(split: str, seed: int, **columns: Any) -> Iterator[Row]:
    """Endless rows with a `seed` each, and the given columns. A seed is held out or for training, never both."""
    check_split(split)
    rng = random.Random(f"seeds/{split}/{seed}")
    while True:
        number = rng.getrandbits(31)
        if is_held_out(f"seed {number}") == (split == "held_out"):
            yield {"seed": number, **columns}
