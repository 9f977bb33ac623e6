"""The tasks of reasoning-gym as endless sources, split by a hash of the question.

Its scorers are the reward `reasoning_gym` (rewards/reasoning.py), which needs the columns `task` and `metadata`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from drumroll.data.split import Row, check_split, of_split
from drumroll.errors import DataError, MissingExtra, did_you_mean

CHUNK = 500
DENIED = {
    "game_of_life_halting": "its scorer gives 1 to any answer",
    "composite": "it is a mixture of others, and data.mixture makes those",
}
"""Tasks that must not be trained on, with the reason."""


def tasks(what: str) -> Mapping[str, Any]:
    """All tasks by name."""
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise MissingExtra(what, "reasoning-gym") from None
    return DATASETS


def problems(name: str, task: str, split: str, seed: int, args: Mapping[str, Any]) -> Iterator[Row]:
    """Endless rows of a task; `args` are the fields of its configuration."""
    known = tasks(f"{name}: reasoning_gym:{task}")
    if task in DENIED:
        raise DataError(f"{name}: reasoning-gym's task '{task}' is refused: {DENIED[task]}; choose another.")
    if task not in known:
        raise DataError(f"{name}: reasoning-gym has no task '{task}'.{did_you_mean(task, known)} It has {', '.join(known)}.")
    for own in ("seed", "size"):
        if own in args:
            raise DataError(f"{name}: args.{own} is not for you to set: rows are endless, and drawn by the run's seed.")
    check_split(split)
    _dataset(name, task, args, 0)
    return of_split(_entries(name, task, args, seed), split)


def _dataset(name: str, task: str, args: Mapping[str, Any], seed: int) -> Any:
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(task, seed=seed, size=CHUNK, **args)
    except Exception as error:  # a configuration checks itself by assert, TypeError, ValueError
        raise DataError(f"{name}: reasoning-gym's task '{task}' does not take args {dict(args)}: {error}.") from error


def _entries(name: str, task: str, args: Mapping[str, Any], seed: int) -> Iterator[Row]:
    for chunk in itertools.count():
        made = _dataset(name, task, args, seed * 1_000_003 + chunk * CHUNK)  # item i of a dataset is drawn by seed + i
        for index in range(CHUNK):
            entry = made[index]
            yield {
                "prompt": entry["question"],
                "answer": entry["answer"],  # None where only the scorer can tell
                "task": task,
                "metadata": entry["metadata"],
            }
