"""Samples as Parquet rows: readable by pandas, duckdb and this module, with every token's facts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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
    ]
)
TEXTS = ("columns", "rewards", "history", "turns")
"""Columns that are kept as JSON."""


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
    }


def write_samples(path: Path, step: int, kind: str, samples: Sequence[Sample]) -> None:
    """Write one file of samples."""
    table = pa.Table.from_pylist([_row(step, kind, s) for s in samples], schema=SCHEMA)
    pq.write_table(table, path, compression="zstd")


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Read them back as plain rows."""
    for row in pq.read_table(path).to_pylist():
        for column in TEXTS:
            row[column] = json.loads(row.get(column) or "[]")
        yield row


def read_failures(path: Path) -> Iterator[tuple[str, str, str]]:
    """Failures and oddities of samples: the sample's id, the text, the frames of the user's code."""
    columns = [name for name in ("id", "failure", "traceback", "notes") if name in pq.read_schema(path).names]
    for row in pq.read_table(path, columns=columns).to_pylist():
        if row["failure"]:
            yield row["id"], row["failure"], row.get("traceback") or ""
        yield from ((row["id"], text, "") for text in row.get("notes") or ())


def read_outcomes(path: Path) -> Iterator[dict[str, Any]]:
    """What the ledger records of samples: id, prompt, domain, fate, stop, reward, failure, history, count of policy tokens."""
    columns = ["step", "id", "prompt_id", "domain", "fate", "stop", "reward", "failure", "history", "traces"]
    for row in pq.read_table(path, columns=columns).to_pylist():
        row["tokens"] = sum(trace["owners"].count(Owner.POLICY) for trace in row.pop("traces"))
        yield row
