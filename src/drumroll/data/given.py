"""Rows that a Python program gives: lists, frames of pandas and polars, Arrow tables, datasets of `datasets`.

None of these libraries is imported here except pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from drumroll.data.split import Row
from drumroll.errors import DataError


class Table(Sequence[Row]):
    """Rows that are made when they are asked for, so that a large dataset stays in its columns, or on disk."""

    def __init__(self, count: int, row: Callable[[int], Row], all_rows: Callable[[], Iterator[Row]] | None = None) -> None:
        self.row, self._rows, self._all = row, count, all_rows

    @override
    def __len__(self) -> int:
        return self._rows

    @override
    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._rows:
            raise IndexError(index)
        return self.row(index)

    @override
    def __iter__(self) -> Iterator[Row]:
        return self._all() if self._all is not None else map(self.row, range(self._rows))


def arrow_rows(table: Any) -> Table:
    """The rows of an Arrow table."""

    def all_rows() -> Iterator[Row]:
        return (row for batch in table.to_batches(max_chunksize=1000) for row in batch.to_pylist())

    return Table(table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0], all_rows)


def given_rows(name: str, value: Any, split: str) -> Sequence[Row]:
    """The rows of an object; of a mapping of splits, those of one split."""
    if isinstance(value, Mapping):
        if split not in value:
            raise DataError(f"{name}: it has no split '{split}'; it has {', '.join(map(str, value))}: set `split`.")
        value = value[split]
    if isinstance(value, (list, tuple)):
        return list(value)
    library = type(value).__module__.partition(".")[0]
    if library == "datasets" and hasattr(value, "__len__"):
        return Table(len(value), value.__getitem__)
    if hasattr(value, "collect") and library == "polars":
        value = value.collect()
    if hasattr(value, "__arrow_c_stream__"):
        return _frame_rows(name, value)
    raise DataError(
        f"{name}: rows cannot be read from a {type(value).__name__}; give a list of rows, a DataFrame of pandas or polars, a "
        "datasets.Dataset, an Arrow table, or a function (split, seed) that yields rows."
    )


def _frame_rows(name: str, frame: Any) -> Table:
    """The rows of a frame. Missing values (NaN, NaT) become None; the index of a pandas frame is no column."""
    import pyarrow as pa

    try:
        if type(frame).__module__.startswith("pandas"):
            return arrow_rows(pa.Table.from_pandas(frame, preserve_index=False))
        return arrow_rows(pa.table(frame))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{name}: the frame mixes types in a column: {error}; convert it, for example with astype(str)."
        ) from None
