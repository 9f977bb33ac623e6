"""Reading rows from files and functions. Rows are plain dicts; what is missing in one is named with its place."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from drumroll.config.data import DatasetConfig
from drumroll.errors import DataError
from drumroll.registry import import_path

Row = dict[str, Any]


def read(name: str, config: DatasetConfig, seed: int) -> list[Row] | Iterator[Row]:
    """The rows of a dataset: a list when it is finite, an iterator when it may be endless."""
    if ":" in config.source and not Path(config.source).exists():
        return _call(name, config, seed)
    rows = _read_file(name, Path(config.source))[: config.limit]
    if not rows:
        raise DataError(f"{name}: {config.source} holds no rows.")
    return rows


def _call(name: str, config: DatasetConfig, seed: int) -> list[Row] | Iterator[Row]:
    function = import_path(config.source, f"{name}.source")
    try:
        rows: Iterable[Row] = function(split=config.split, seed=seed, **config.args)
    except TypeError as error:
        raise DataError(
            f"{name}: {config.source} could not be called with split, seed and args {config.args}: {error}."
        ) from error
    if isinstance(rows, list):
        if not rows:
            raise DataError(f"{name}: {config.source} returned no rows for split '{config.split}'.")
        return rows[: config.limit]
    return iter(rows) if config.limit is None else _distinct(rows, config.limit, config.prompt)


def _distinct(rows: Iterable[Row], limit: int, column: str) -> list[Row]:
    """The first `limit` different rows of an endless source."""
    seen: dict[str, Row] = {}
    for tries, row in enumerate(rows):
        seen.setdefault(str(row.get(column, row)), row)
        if len(seen) >= limit or tries > 1000 * limit:
            break
    return list(seen.values())


def _read_file(name: str, path: Path) -> list[Row]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{name}: cannot read {path}: {error.strerror}.") from None
    try:
        match path.suffix:
            case ".jsonl":
                return [_json_row(name, path, n, line) for n, line in enumerate(text.decode().split("\n"), 1) if line.strip()]
            case ".json":
                rows = json.loads(text)
                if not isinstance(rows, list):
                    raise DataError(f"{name}: {path} must hold a list of rows, it holds a {type(rows).__name__}.")
                return rows
            case ".csv":
                return list(csv.DictReader(io.StringIO(text.decode(), newline="")))
            case ".parquet":
                import pyarrow.parquet as pq

                return pq.read_table(path).to_pylist()
    except (ValueError, OSError) as error:
        raise DataError(f"{name}: {path} could not be parsed: {error}.") from None
    raise DataError(f"{name}: {path} is of no known kind; use .jsonl, .json, .csv, .parquet or module:function.")


def _json_row(name: str, path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{name}: {path}:{number} is not valid JSON: {error}.") from None
    if not isinstance(row, dict):
        raise DataError(f"{name}: {path}:{number} must be an object with columns, it is a {type(row).__name__}.")
    return row
