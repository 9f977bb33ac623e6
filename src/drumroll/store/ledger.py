"""The ledger: the fate of every prompt drawn and every sample started, the commits and the checkpoints, through crashes and resumes.

The ledger listens to the scheduler's events. It buffers rows and writes them in few transactions. A checkpoint's row is
written when the checkpoint is complete on disk, and a step's commit row after the step's other files; both are on disk when
the call returns. On resume all rows after the checkpoint become `superseded`, and a new *life* of the run does those steps
again. Steps that the ledger lost (a power cut, a deleted file, a copy without its write-ahead log) are rebuilt from the
recorded rollouts, in life 0.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from drumroll.errors import StoreError
from drumroll.lifecycle import DrawEvent, Event
from drumroll.runfiles.ledger_queries import LedgerReader, connect
from drumroll.sample import Fate, Sample, parse_id

SCHEMA = """
BEGIN;
CREATE TABLE IF NOT EXISTS commits (
    step INTEGER, life INTEGER, time REAL, PRIMARY KEY (life, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints (
    step INTEGER, life INTEGER, name TEXT, time REAL, PRIMARY KEY (life, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS draws (
    life INTEGER, draw INTEGER, attempt INTEGER, prompt TEXT, domain TEXT, fate TEXT, reason TEXT, step INTEGER,
    PRIMARY KEY (life, draw, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    life INTEGER, draw INTEGER, attempt INTEGER, sample INTEGER, state TEXT, stop TEXT, reward REAL, tokens INTEGER,
    failure TEXT, history TEXT, step INTEGER,
    PRIMARY KEY (life, draw, attempt, sample)) WITHOUT ROWID;
COMMIT;
"""
NEWEST_LIFE = (
    "SELECT MAX(life) FROM (SELECT life FROM draws UNION ALL SELECT life FROM commits UNION ALL SELECT life FROM checkpoints)"
)
FLUSH_ROWS = 4096
FLUSH_SECONDS = 1.0
RECOVERED = 0
"""The life of rebuilt rows; the first life of a run is 1."""


class Ledger(LedgerReader):
    """Writes `ledger.sqlite` of a run. `step` is the step under way; fates given during it carry its number."""

    life: int

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.step = 1
        self._samples: dict[tuple[int, int, int], Sample] = {}
        self._draws: dict[tuple[int, int], DrawEvent] = {}
        self._flushed = time.monotonic()

    @override
    def _open(self) -> tuple[sqlite3.Connection, None]:
        try:
            db = connect(self.path, "mode=rwc")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(SCHEMA)
            self.life = db.execute(NEWEST_LIFE).fetchone()[0] or 0
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot open the ledger {self.path}: {error}. Move it away to continue with --resume, which rebuilds it from rollouts/."
            ) from error
        return db, None

    # --- listening ---

    def __call__(self, event: Event | DrawEvent) -> None:
        """Buffer an event's row; it is in the file after the next flush."""
        if isinstance(event, Event):
            sample = event.sample
            self._samples[(sample.draw, sample.attempt, sample.index)] = sample
        else:
            self._draws[(event.group.draw, event.group.attempt)] = event
        if len(self._samples) > FLUSH_ROWS or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows."""
        self._transaction([])

    def next_step(self) -> None:
        """Flush, and give later events to the next step. Call it when the step's work is done and its state is taken."""
        self.flush()
        self.step += 1

    def commit(self, step: int) -> None:
        """Write the commit row of a step. Call it when everything of the step but its checkpoint is on disk."""
        row = (step, self.life, time.time())
        self._transaction([("INSERT OR REPLACE INTO commits VALUES (?, ?, ?)", row)], durable=True)

    def add_checkpoint(self, step: int, name: str) -> None:
        """Write the row that names a checkpoint. Call it when the checkpoint is complete on disk, before or after the commit."""
        row = (step, self.life, name, time.time())
        self._transaction([("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)], durable=True)

    def _transaction(self, extra: Iterable[tuple[str, tuple[Any, ...]]], *, durable: bool = False) -> None:
        """Write the buffered rows and `extra`; `durable` syncs the write-ahead log, with all earlier transactions in it."""
        try:
            self.db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self.db.execute("BEGIN")
            self.db.executemany("INSERT OR REPLACE INTO draws VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self._draw_rows())
            self.db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", self._sample_rows())
            for query, values in extra:
                self.db.execute(query, values)
            self.db.execute("COMMIT")
        except sqlite3.Error as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise StoreError(
                f"cannot write the ledger {self.path}: {error}. Free some space, then continue with --resume."
            ) from error
        self._samples.clear()
        self._draws.clear()
        self._flushed = time.monotonic()

    def _draw_rows(self) -> Iterator[tuple[Any, ...]]:
        for (draw, attempt), event in self._draws.items():
            prompt, fate = event.group.prompt, event.fate.value if event.fate else None
            step = self.step if fate else None
            yield self.life, draw, attempt, prompt.id, prompt.domain, fate, event.reason or None, step

    def _sample_rows(self) -> Iterator[tuple[Any, ...]]:
        for (draw, attempt, sample), s in self._samples.items():
            ended = isinstance(s.state, Fate)
            history = json.dumps([(state, round(at, 4)) for state, at in s.history])
            yield (
                *(self.life, draw, attempt, sample, s.state.value, s.stop and s.stop.value, s.reward, s.policy_length()),
                *(str(s.failure) if s.failure else None, history, self.step if ended else None),
            )

    # --- resuming ---

    def resume(self, step: int) -> None:
        """Begin a new life after `step`: later rows are superseded, and their steps are done again."""
        undone = "step IS NULL OR step > ?"
        self._transaction(
            [
                (f"UPDATE samples SET state = 'superseded' WHERE {undone}", (step,)),
                (f"UPDATE draws SET fate = 'superseded' WHERE {undone}", (step,)),
                ("DELETE FROM commits WHERE step > ?", (step,)),
                ("DELETE FROM checkpoints WHERE step > ?", (step,)),
            ],
            durable=True,
        )
        self.life += 1
        self.step = step + 1

    def rebuild(self, steps: Iterable[int], checkpoints: Mapping[int, str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Add commit rows for steps, rows for the checkpoints by step, and rows for the recorded samples that are not known.

        Groups that were dropped without a failure were never recorded and stay unknown.
        """
        now = time.time()
        commits = [("INSERT OR REPLACE INTO commits VALUES (?, ?, ?)", (step, RECOVERED, now)) for step in steps]
        named = [
            ("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", (step, RECOVERED, name, now))
            for step, name in checkpoints.items()
        ]
        self._transaction([*commits, *named, *_recovered(rows)], durable=True)

    @override
    def close(self) -> None:
        """Write the buffered rows, and close."""
        self.flush()
        super().close()


_ADD_SAMPLE = """INSERT OR REPLACE INTO samples SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11
    WHERE NOT EXISTS (SELECT 1 FROM samples WHERE draw = ?2 AND attempt = ?3 AND sample = ?4 AND step = ?11
    AND state <> 'superseded')"""
_ADD_DRAW = """INSERT OR REPLACE INTO draws SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8
    WHERE NOT EXISTS (SELECT 1 FROM draws WHERE draw = ?2 AND attempt = ?3 AND step = ?8 AND fate <> 'superseded')"""


def _recovered(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield inserts for recorded samples and their draws. The last attempt at a draw that was never trained failed."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        draw, sample, tried = parse_id(row["id"])
        groups.setdefault((draw, tried), []).append(row)
        known = (row["fate"], row["stop"], row["reward"], row["tokens"], row["failure"], row["history"], row["step"])
        yield _ADD_SAMPLE, (RECOVERED, draw, tried, sample, *known)
    trained = {key for key, samples in groups.items() if any(row["fate"] == Fate.TRAINED for row in samples)}
    settled = dict(sorted(groups)) | dict(trained)  # draw → the attempt that settled it
    for (draw, tried), samples in groups.items():
        newest = samples[-1]
        fate = Fate.TRAINED if (draw, tried) in trained else Fate.FAILED if settled[draw] == tried else Fate.ABORTED
        reason = None if fate is Fate.TRAINED else "rebuilt from the rollouts"
        row = (draw, tried, newest["prompt_id"], newest["domain"], fate.value, reason, newest["step"])
        yield _ADD_DRAW, (RECOVERED, *row)
