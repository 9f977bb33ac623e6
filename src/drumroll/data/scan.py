"""A look at all rows of local files before any model is loaded, so that a bad one does not end a run hours later."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from drumroll.config.data import DatasetConfig
from drumroll.config.environment import NONE, EnvironmentConfig
from drumroll.data.layouts import arrange
from drumroll.data.rows import is_local, local_rows, place
from drumroll.data.source import RequiredColumns, RowCheck
from drumroll.errors import BadRow, ConfigError


def scan(
    section: str,
    datasets: Mapping[str, DatasetConfig],
    required: Callable[[DatasetConfig], RequiredColumns],
    environment: EnvironmentConfig = NONE,
) -> set[str] | None:
    """Refuse local files with rows that lack the prompt or a required column: the first by its place, all of them counted.

    Returns the domains of the rows; None if a dataset that is not local may have any.
    """
    domains: set[str] | None = set()
    for name, dataset in datasets.items():
        found = {dataset.domain} if dataset.domain else None
        if is_local(dataset):
            found = _scan(RowCheck(f"{section}.{name}", dataset, required(dataset), environment))
        domains = None if domains is None or found is None else domains | found
    return domains


def _scan(check: RowCheck) -> set[str]:
    domains = set[str]()
    first: tuple[BadRow | ConfigError, int] | None = None
    bad = count = 0
    for number, row in enumerate(local_rows(check.name, check.config)):
        count += 1
        try:
            domains.add(check(arrange(check.name, check.config, row), number)[0])
        except (BadRow, ConfigError) as error:
            bad += 1
            first = first or (error, number)
    if first is not None:
        error, number = first
        raise type(error)(f"{error} It is {place(check.name, check.config, number)}; {bad} of {count} rows cannot be used.")
    return domains
