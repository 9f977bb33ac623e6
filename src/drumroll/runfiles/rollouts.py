"""Recorded samples as Parquet rows, one file per step and kind: `rollouts/train-000001.parquet`, `rollouts/eval-000000.parquet`.

pandas, duckdb and this module read them. Files have small row groups, so that the tokens of one sample are read without
those of the other samples of its step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from drumroll.errors import StoreError, did_you_mean
from drumroll.runfiles.durable import make_folder, new_file
from drumroll.runfiles.frames import SampleRow
from drumroll.sample import Fate, Owner, Sample

TRACE = pa.struct(
    [
        ("tokens", pa.list_(pa.int32())),
        ("owners", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("kind", pa.string()),
        ("id", pa.string()),
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("columns", pa.string()),
        ("stop", pa.string()),
        ("fate", pa.string()),
        ("reward", pa.float32()),
        ("rewards", pa.string()),
        ("failure", pa.string()),
        ("traceback", pa.string()),
        ("history", pa.string()),
        ("traces", pa.list_(TRACE)),
        ("turns", pa.string()),
        ("success", pa.bool_()),
        ("notes", pa.list_(pa.string())),
        ("extra", pa.string()),
    ]
)
JSON_COLUMNS = ("columns", "rewards", "history", "turns", "extra")
ROW_GROUP = 64
"""Rows per row group: the smallest part of a file that can be read."""
FILE_NAME = re.compile(r"(?P<kind>.+)-(?P<step>\d+)\.parquet")


@dataclass(frozen=True)
class RolloutFile:
    """A file of recorded samples, with the kind (`train`, `eval`) and the step that its name states."""

    path: Path
    kind: str
    step: int


def rollout_path(folder: Path, kind: str, step: int) -> Path:
    """Return the path of the file for the samples of a kind and step."""
    return folder / f"{kind}-{step:06d}.parquet"


def rollout_files(folder: Path) -> list[RolloutFile]:
    """List the complete files of a folder by name. Files that are being written, and files of other names, are left out."""
    found = ((path, FILE_NAME.fullmatch(path.name)) for path in sorted(folder.glob("*.parquet")))
    return [RolloutFile(path, name["kind"], int(name["step"])) for path, name in found if name is not None]


# --- writing ---


def _row(step: int, kind: str, sample: Sample) -> dict[str, Any]:
    content = sample.prompt.content
    return {
        "step": step,
        "kind": kind,
        "id": sample.id,
        "prompt_id": sample.prompt.id,
        "domain": sample.prompt.domain,
        "prompt": content if isinstance(content, str) else json.dumps(content),
        "completion": sample.completion,
        "columns": json.dumps(dict(sample.prompt.columns), default=str),
        "stop": sample.stop,
        "fate": sample.state if isinstance(sample.state, Fate) else None,
        "reward": sample.reward,
        "rewards": json.dumps(sample.rewards),
        "failure": str(sample.failure) if sample.failure else None,
        "traceback": sample.failure.traceback if sample.failure else None,
        "history": json.dumps(sample.history),
        "traces": [
            {"tokens": t.tokens, "owners": [int(o) for o in t.owners], "logprobs": t.logprobs, "versions": t.versions}
            for t in sample.traces
        ],
        "turns": json.dumps([asdict(turn) for turn in sample.turns]),
        "success": sample.success,
        "notes": [str(note) for note in sample.notes],
        "extra": json.dumps(sample.extra, default=str),
    }


def sample_row(step: int, kind: str, sample: Sample) -> SampleRow:
    """Return a sample as `read_samples` yields it from its file."""
    return cast(SampleRow, _decoded(_row(step, kind, sample), SCHEMA.names))


def write_samples(path: Path, step: int, kind: str, samples: Sequence[Sample]) -> None:
    """Write a file of samples; it appears under its name when it is complete and on disk."""
    _write(path, [_row(step, kind, s) for s in samples])


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of rows as `read_samples` yields them."""
    _write(path, [{**row, **{c: json.dumps(row[c], default=str) for c in JSON_COLUMNS}} for row in rows])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    make_folder(path.parent)
    with new_file(path) as temporary:
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP)


# --- reading ---


def read_samples(
    path: Path, columns: Sequence[str] | None = None, *, ids: Collection[str] | None = None, domain: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, all or those of some ids or of a domain, with all columns or the given ones.

    Reads only the given columns of those row groups that hold a wanted row, besides the columns `id` and `domain`.
    """
    wanted = list(columns) if columns is not None else SCHEMA.names
    with pq.ParquetFile(path) as file:
        stored = file.schema_arrow.names
        if unknown := next((name for name in wanted if name not in SCHEMA.names and name not in stored), None):
            raise StoreError(f"{path} has no column '{unknown}'; it has {', '.join(stored)}.{did_you_mean(unknown, stored)}")
        present = stored if columns is None else [name for name in wanted if name in stored]
        for group in range(file.num_row_groups):
            picked = _picked(file, group, ids, domain)
            if picked is not None and not picked:
                continue
            table = file.read_row_group(group, columns=present)
            for row in (table if picked is None else table.take(picked)).to_pylist():
                yield _decoded(row, wanted)


def _picked(file: pq.ParquetFile, group: int, ids: Collection[str] | None, domain: str | None) -> list[int] | None:
    """The wanted rows of a row group; None stands for all."""
    if ids is None and domain is None:
        return None
    keys = file.read_row_group(group, columns=["id", "domain"]).to_pylist()
    return [
        i for i, key in enumerate(keys) if (ids is None or key["id"] in ids) and (domain is None or key["domain"] == domain)
    ]


def _decoded(row: dict[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """Decode the JSON columns of a row. A column that an older library did not record is None, or an empty list."""
    for name in wanted:
        row[name] = json.loads(row.get(name) or "[]") if name in JSON_COLUMNS else row.get(name)
    return row


def read_failures(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the failures and notes of a file's samples: the sample's id, the text, the frames of the user's code."""
    for row in read_samples(path, ("id", "failure", "traceback", "notes")):
        if row["failure"]:
            yield row["id"], row["failure"], row["traceback"] or ""
        yield from ((row["id"], text, "") for text in row["notes"] or ())


def read_outcomes(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the facts of a file's samples that the ledger records; `history` is JSON text, `tokens` counts policy tokens."""
    columns = ("step", "id", "prompt_id", "domain", "fate", "stop", "reward", "failure", "history", "traces")
    for row in read_samples(path, columns):
        row["tokens"] = sum(trace["owners"].count(Owner.POLICY) for trace in row.pop("traces"))
        yield row | {"history": json.dumps(row["history"])}
