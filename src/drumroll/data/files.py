"""Files of rows that are larger than memory: rows are read when they are asked for, by number.

Of a .jsonl file only the place of each line is kept. A large .parquet file is copied once to a temporary file that the system
maps into memory; a small one is held in columns.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from drumroll.data.given import Table, arrow_rows
from drumroll.data.split import Row
from drumroll.errors import DataError

HELD = 256 * 2**20
"""Bytes of columns that are held in memory."""


def json_lines(name: str, path: Path) -> Table:
    """The rows of a .jsonl file; blank lines are none."""
    starts = array("q")
    at = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(at)
            at += len(line)

    def row(index: int) -> Row:
        with path.open("rb") as file:
            file.seek(starts[index])
            return _parsed(name, path, index, file.readline())

    def all_rows() -> Iterator[Row]:
        with path.open("rb") as file:
            lines = (line for line in file if line.strip())
            yield from (_parsed(name, path, index, line) for index, line in enumerate(lines))

    return Table(len(starts), row, all_rows)


def line_number(path: Path, index: int) -> int:
    """The line of a row in a .jsonl file, from 1."""
    with path.open("rb") as file:
        return next(islice((number for number, line in enumerate(file, 1) if line.strip()), index, None))


def _parsed(name: str, path: Path, index: int, line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{name}: {path}:{line_number(path, index)} is not valid JSON: {str(error).rstrip('.')}.") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise DataError(f"{name}: {path}:{line_number(path, index)} must be an object with columns, it is a {kind}.")
    return row


def chained(parts: Sequence[Sequence[Row]]) -> Table:
    """The rows of several files, one after the other."""
    ends = list(accumulate(map(len, parts)))

    def row(index: int) -> Row:
        part = bisect_right(ends, index)
        return parts[part][index - (ends[part - 1] if part else 0)]

    return Table(ends[-1] if ends else 0, row, lambda: chain.from_iterable(parts))


def parquet_rows(paths: Sequence[Path]) -> Table:
    """The rows of .parquet files, one after the other; their columns are united."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sizes = [group.total_byte_size for path in paths for group in _groups(pq.read_metadata(path))]
    if sum(sizes) <= HELD:
        return arrow_rows(pa.concat_tables([pq.read_table(path) for path in paths], promote_options="permissive"))
    schema = pa.unify_schemas([pq.read_schema(path) for path in paths], promote_options="permissive")
    handle, name = tempfile.mkstemp(suffix=".arrow", prefix="drumroll-rows-")
    try:
        with os.fdopen(handle, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for path in paths:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(batch_size=1000):
                        part = pa.concat_tables([schema.empty_table(), pa.table(batch)], promote_options="permissive")
                        writer.write_table(part.cast(schema))
        return arrow_rows(pa.ipc.open_file(pa.memory_map(name)).read_all())
    finally:
        os.unlink(name)  # the system keeps the file as long as it is mapped


def _groups(metadata: Any) -> Iterator[Any]:
    return (metadata.row_group(i) for i in range(metadata.num_row_groups))
