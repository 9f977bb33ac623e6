"""Reading rows from files, directories, the hub, functions and objects of Python. Rows are plain dicts in our layout."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from drumroll.config.data import DatasetConfig
from drumroll.data import runs
from drumroll.data.files import chained, json_lines, line_number, parquet_rows
from drumroll.data.given import Table, arrow_rows, given_rows
from drumroll.data.layouts import arrange
from drumroll.data.runs import is_run
from drumroll.data.split import Row
from drumroll.errors import DataError, MissingExtra
from drumroll.objects import PREFIX
from drumroll.registry import import_path

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
HUB = "hf:"
GYM = "reasoning_gym:"
SPLIT_WORDS = ("train", "test", "validation", "val", "dev", "eval", "held_out")


def read(name: str, config: DatasetConfig, seed: int, *, answers: bool = False) -> Sequence[Row] | Iterator[Row]:
    """The rows of a dataset: a sequence when it is finite, an iterator when it may be endless.

    A run gives pairs, or its `answers`.
    """
    rows = _open(name, config, seed, answers=answers)
    ours = partial(arrange, name, config)
    if isinstance(rows, Sequence):
        if not rows:
            raise DataError(f"{name}: {config.source} holds no rows.")
        count = min(len(rows), config.limit or len(rows))
        if isinstance(rows, Table):
            row = rows.row
            return Table(count, lambda index: ours(row(index)), lambda: map(ours, islice(rows, count)))
        return [ours(row) for row in rows[:count]]
    return map(ours, rows) if config.limit is None else _distinct(map(ours, rows), config.limit, config.prompt)


def is_local(config: DatasetConfig) -> bool:
    """Whether a dataset is a file, a directory or rows given by Python."""
    return _kind(config.source) in (_read_file, _read_directory, _given)


def is_function(config: DatasetConfig) -> bool:
    """Whether a dataset is a function of a module."""
    return _kind(config.source) is _call


def local_rows(name: str, config: DatasetConfig) -> Iterator[Row]:
    """The rows of a local dataset as they stand in its files."""
    rows = _open(name, config, 0)
    assert isinstance(rows, Sequence), "files are finite"
    if not rows:
        raise DataError(f"{name}: {config.source} holds no rows.")
    return islice(rows, config.limit)


def place(name: str, config: DatasetConfig, index: int) -> str:
    """Where a row of a local dataset stands: its file, and its line or row."""
    if _kind(config.source) is _given:
        return f"row {index + 1} of {config.source}"
    path = Path(config.source).expanduser()
    files = [path] if path.is_file() else _files(name, path, config.split)
    for file in files:
        rows = _read_file(name, file)
        if index < len(rows):
            return f"{file}:{line_number(file, index)}" if file.suffix == ".jsonl" else f"row {index + 1} of {file}"
        index -= len(rows)
    return f"row {index + 1} of {path}"  # saved by `datasets`


def _kind(source: str) -> Callable[..., Any]:
    """What opens a source."""
    path = Path(source).expanduser()
    if source.startswith(PREFIX):
        return _call if callable(import_path(source, "source")) else _given
    if source.startswith(HUB):
        return _read_hub
    if source.startswith(GYM):
        return _read_gym
    if is_run(path):
        return is_run
    if path.is_dir():
        return _read_directory
    if ":" in source and not path.exists():
        return _call
    of_hub = path.suffix not in SUFFIXES and source.count("/") == 1 and source[0] not in "./~"
    return _read_hub if of_hub and not path.exists() and not path.parent.is_dir() else _read_file


def _open(name: str, config: DatasetConfig, seed: int, *, answers: bool = False) -> Sequence[Row] | Iterator[Row]:
    kind, path = _kind(config.source), Path(config.source).expanduser()
    if kind is is_run:
        return runs.answers(name, config) if answers else runs.pairs(name, config)
    if unfit := next((key for key in ("where", "best") if getattr(config, key) is not None), None):
        raise DataError(f"{name}.{unfit} chooses samples of a run directory, and {config.source} is none; leave it out.")
    if kind is _read_hub:
        return _read_hub(name, config.source.removeprefix(HUB), config)
    if kind is _read_directory:
        return _read_directory(name, path, config.split)
    return _read_file(name, path) if kind is _read_file else kind(name, config, seed)


def _read_gym(name: str, config: DatasetConfig, seed: int) -> Iterator[Row]:
    from drumroll.data.reasoning import problems

    return problems(name, config.source.removeprefix(GYM), config.split, seed, config.args)


def _given(name: str, config: DatasetConfig, seed: int) -> Sequence[Row]:
    return given_rows(name, import_path(config.source, f"{name}.source"), config.split)


def _call(name: str, config: DatasetConfig, seed: int) -> list[Row] | Iterator[Row]:
    function = import_path(config.source, f"{name}.source")
    try:
        rows: Iterable[Row] = function(split=config.split, seed=seed, **config.args)
    except TypeError as error:
        raise DataError(
            f"{name}: {config.source} could not be called with split, seed and args {config.args}: {error}."
        ) from error
    if isinstance(rows, list) and not rows:
        raise DataError(f"{name}: {config.source} returned no rows for split '{config.split}'.")
    return rows if isinstance(rows, list) else iter(rows)


def _distinct(rows: Iterable[Row], limit: int, column: str) -> list[Row]:
    """The first `limit` different rows of an endless source."""
    seen: dict[str, Row] = {}
    repeated = 0
    for row in rows:
        key = str(row.get(column, row))
        repeated = repeated + 1 if key in seen else 0
        seen.setdefault(key, row)
        if len(seen) >= limit or repeated > 1000 + 20 * limit:
            break
    return list(seen.values())


# --- the hub ---


def _read_hub(name: str, repo: str, config: DatasetConfig) -> Table:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise MissingExtra(f"{name}: reading '{repo}' from the Hugging Face hub", "datasets") from None
    args = dict(config.args)
    subset = args.pop("config", None)
    try:
        rows: Any = load_dataset(repo, subset, split=config.split, **args)
        return Table(len(rows), rows.__getitem__)
    except Exception as error:  # whatever the network, the hub or a broken file may raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise DataError(
            f"{name}: '{repo}' (split '{config.split}') could not be read from the Hugging Face hub: {reason}. "
            "Offline, give a file, or a directory of its files or saved by datasets."
        ) from error


# --- directories ---


def _read_directory(name: str, path: Path, split: str) -> Sequence[Row]:
    """Rows of a dataset saved by `datasets`, or of all files of a split, in the order of their names."""
    files = _files(name, path, split)
    if not files:
        return _read_saved(name, path if (path / "state.json").exists() else path / split)
    if all(p.suffix == ".parquet" for p in files):
        return _table(name, path, lambda: parquet_rows(files))
    return chained([_read_file(name, p) for p in files])


def _files(name: str, path: Path, split: str) -> list[Path]:
    """The files of a split, in the order of their names; none for a dataset saved by `datasets`."""
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise DataError(f"{name}: {path} has no split '{split}'; it has {', '.join(splits)}: set `split`.")
        path /= split
    if (path / "state.json").exists():
        return []
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and not p.name.startswith((".", "dataset_info")))
    if not files:
        raise DataError(f"{name}: the directory {path} holds no {', '.join(SUFFIXES)} files.")
    return _of_split(name, path, files, split)


def _of_split(name: str, folder: Path, files: list[Path], split: str) -> list[Path]:
    """Files whose name or folder begins with the split's name; all of them when none names any split."""

    def names(file: Path, word: str) -> bool:
        parts = [p.partition(".")[0].partition("-")[0] for p in file.relative_to(folder).parts]
        return any(part == word or part.startswith(f"{word}_") for part in parts)

    found = [f for f in files if names(f, split)]
    others = [word for word in SPLIT_WORDS if any(names(f, word) for f in files)]
    if not found and others:
        raise DataError(f"{name}: {folder} has no files of split '{split}'; it has {', '.join(others)}: set `split`.")
    return found or files


def _read_saved(name: str, path: Path) -> Table:
    """What `Dataset.save_to_disk` wrote: Arrow streams, used from disk."""
    import pyarrow as pa

    def stream(file: str) -> Any:
        return pa.ipc.open_stream(pa.memory_map(str(path / file))).read_all()

    state = json.loads((path / "state.json").read_text())
    files = [part["filename"] for part in state["_data_files"]]
    return _table(name, path, lambda: arrow_rows(pa.concat_tables(map(stream, files), promote_options="permissive")))


def _table(name: str, path: Path, opened: Callable[[], Table]) -> Table:
    import pyarrow as pa

    try:
        return opened()
    except (ValueError, OSError, pa.ArrowException) as error:
        raise DataError(f"{name}: {path} could not be parsed: {str(error).rstrip('.')}.") from None


# --- files ---


def _read_file(name: str, path: Path) -> Sequence[Row]:
    if path.suffix == ".parquet" and path.exists():
        return _table(name, path, lambda: parquet_rows([path]))
    try:
        match path.suffix:
            case ".jsonl":
                return json_lines(name, path)
            case ".json":
                rows = json.loads(path.read_bytes())
                if not isinstance(rows, list):
                    raise DataError(f"{name}: {path} must hold a list of rows, it holds a {type(rows).__name__}.")
                return rows
            case ".csv":
                return list(csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")))
    except OSError as error:
        raise DataError(f"{name}: cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise DataError(f"{name}: {path} could not be parsed: {str(error).rstrip('.')}.") from None
    if not path.exists():
        hub = "" if path.suffix in SUFFIXES else "; a dataset of the Hugging Face hub is hf:owner/name"
        raise DataError(f"{name}: cannot read {path}: {os.strerror(errno.ENOENT)}{hub}.")
    raise DataError(
        f"{name}: {path} is of no known kind; use .jsonl, .json, .csv, .parquet, a directory, hf:owner/name or module:function."
    )
