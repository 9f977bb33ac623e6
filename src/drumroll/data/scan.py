"""A look at all rows of local files before any model is loaded, so that a bad one does not end a run hours later."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from drumroll.config import AnyConfig, RLConfig
from drumroll.config.data import DatasetConfig
from drumroll.config.environment import NONE
from drumroll.data.layouts import arrange
from drumroll.data.rows import is_local, local_rows, place
from drumroll.data.source import RequiredColumns, RowCheck
from drumroll.errors import BadRow, ConfigError


def scan(config: AnyConfig, required: RequiredColumns) -> None:
    """Refuse local files with rows that lack what prompts and rewards need: the first by its place, all of them counted."""
    environment = config.environment if isinstance(config, RLConfig) else NONE
    for name, dataset, columns in _datasets(config, required):
        if is_local(dataset):
            _scan(RowCheck(name, dataset, columns, environment))


def _datasets(config: AnyConfig, required: RequiredColumns) -> Iterator[tuple[str, DatasetConfig, RequiredColumns]]:
    for name, dataset in config.data.train.items():
        imitated = partial(_completion, dataset.completion)
        yield f"data.train.{name}", dataset, required if isinstance(config, RLConfig) else imitated
    for name, dataset in config.eval.sets.items():
        yield f"eval.sets.{name}", dataset, required


def _completion(column: str, domain: str, *, played: bool = False) -> list[tuple[str, str]]:
    return [(column, "supervised training")]


def _scan(check: RowCheck) -> None:
    first: tuple[BadRow | ConfigError, int] | None = None
    bad = count = 0
    for number, row in enumerate(local_rows(check.name, check.config)):
        count += 1
        try:
            check(arrange(check.name, check.config, row), number)
        except (BadRow, ConfigError) as error:
            bad += 1
            first = first or (error, number)
    if first is not None:
        error, number = first
        raise type(error)(f"{error} It is {place(check.name, check.config, number)}; {bad} of {count} rows cannot be used.")
