"""Generated problems in two splits that can never meet: a hash of a problem's text says which one it belongs to."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from drumroll.errors import DataError

Row = dict[str, Any]
SPLITS = ("train", "held_out")
HELD_OUT_SHARE = 5
TRIES = 10_000


def is_held_out(prompt: str) -> bool:
    """One problem in `HELD_OUT_SHARE` is held out, decided by its text alone."""
    return hashlib.sha256(prompt.encode()).digest()[0] % HELD_OUT_SHARE == 0


def check_split(split: str) -> None:
    """Generated problems have two splits."""
    if split not in SPLITS:
        raise DataError(f"split '{split}' does not exist; problems have 'train' and 'held_out'.")


def of_split(rows: Iterable[Row], split: str) -> Iterator[Row]:
    """The rows of one split. A source with hardly any in it is an error, not an endless search."""
    missed = 0
    for row in rows:
        if is_held_out(row["prompt"]) == (split == "held_out"):
            missed = 0
            yield row
        else:
            missed += 1
            if missed >= TRIES:
                raise DataError(f"{TRIES} problems in a row are not of split '{split}': there are too few different ones.")


def stream(make: Callable[[random.Random], Row], split: str, seed: int) -> Iterator[Row]:
    """Endless problems of a split."""
    check_split(split)
    rng = random.Random(f"{split}/{seed}")
    return of_split(iter(lambda: make(rng), None), split)
