"""The ledger: what became of every prompt drawn and every sample started, through crashes and resumes.

A listener of the scheduler's events. Rows are buffered and written in few transactions; a step's commit row is written
last, after its checkpoint, and is on disk when `commit` returns. On resume all that came after the checkpoint becomes
`superseded`, and is done again in a new *life* of the run. Steps that the ledger lost (a power cut, a deleted file, a copy
without its write-ahead log) are rebuilt from the recorded rollouts, in life 0.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from drumroll.errors import StoreError
from drumroll.lifecycle import DrawEvent, Event
from drumroll.sample import GREEDY, Fate, Sample

SCHEMA = """
CREATE TABLE IF NOT EXISTS commits (
    step INTEGER, life INTEGER, checkpoint TEXT, time REAL, PRIMARY KEY (life, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS draws (
    life INTEGER, draw INTEGER, attempt INTEGER, prompt TEXT, domain TEXT, fate TEXT, reason TEXT, step INTEGER,
    PRIMARY KEY (life, draw, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    life INTEGER, draw INTEGER, attempt INTEGER, place INTEGER, state TEXT, stop TEXT, reward REAL, tokens INTEGER,
    failure TEXT, history TEXT, step INTEGER,
    PRIMARY KEY (life, draw, attempt, place)) WITHOUT ROWID;
"""
FATES = tuple(fate.value for fate in Fate)
FLUSH_ROWS = 4096
FLUSH_SECONDS = 1.0
RECOVERED = 0
"""The life of rebuilt rows; the first life of a run is 1."""


class Ledger:
    """`ledger.sqlite` of a run. `step` is the step under way; fates given during it carry its number."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        if read_only and not path.exists():
            raise StoreError(f"{path.parent} has no ledger: it was not made by reinforcement learning, or never started.")
        try:
            where = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
            self.db = sqlite3.connect(where, uri=True, isolation_level=None)
            if not read_only:
                self.db.execute("PRAGMA journal_mode=WAL")
                self.db.execute("PRAGMA synchronous=NORMAL")
                self.db.executescript(SCHEMA)
            self.life: int = self.one("SELECT COALESCE(MAX(life), 0) FROM draws") or 0
        except sqlite3.Error as error:
            hint = "" if read_only else " Move it away to continue with --resume, which rebuilds it from rollouts/."
            raise StoreError(f"cannot open the ledger {path}: {error}.{hint}") from error
        self.step = 1
        self._samples: dict[tuple[int, int, int], Sample] = {}
        self._draws: dict[tuple[int, int], DrawEvent] = {}
        self._flushed = time.monotonic()

    def one(self, query: str, *values: Any) -> Any:
        """The first value of a query."""
        row = self.db.execute(query, values).fetchone()
        return None if row is None else row[0]

    # --- listening ---

    def __call__(self, event: Event | DrawEvent) -> None:
        """Note an event; what is noted is on disk after the next flush."""
        if isinstance(event, Event):
            sample = event.sample
            self._samples[(sample.draw, sample.attempt, sample.index)] = sample
        else:
            self._draws[(event.group.draw, event.group.attempt)] = event
        if len(self._samples) > FLUSH_ROWS or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was noted."""
        self._transaction([])

    def next_step(self) -> None:
        """The step's work is done and its state is taken: what is noted from now on belongs to the next step."""
        self.flush()
        self.step += 1

    def commit(self, step: int, checkpoint: Path | None) -> None:
        """The commit row of a step, with the checkpoint that holds it. Call it last."""
        row = (step, self.life, None if checkpoint is None else checkpoint.name, time.time())
        self._transaction([("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?)", row)], durable=True)

    def _transaction(self, extra: Iterable[tuple[str, tuple[Any, ...]]], *, durable: bool = False) -> None:
        """Write what was noted and `extra`; `durable` syncs the write-ahead log, with all earlier transactions in it."""
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
        for (draw, attempt, place), s in self._samples.items():
            ended = isinstance(s.state, Fate)
            history = json.dumps([(state, round(at, 4)) for state, at in s.history])
            yield (
                *(self.life, draw, attempt, place, s.state.value, s.stop and s.stop.value, s.reward, s.policy_length()),
                *(str(s.failure) if s.failure else None, history, self.step if ended else None),
            )

    # --- resuming ---

    def committed(self) -> set[int]:
        """The steps that have a commit row."""
        return {step for (step,) in self.db.execute("SELECT step FROM commits")}

    def resume(self, step: int) -> None:
        """Begin a new life after the commit of `step`: whatever came later is superseded, and will be done again."""
        undone = "step IS NULL OR step > ?"
        self._transaction(
            [
                (f"UPDATE samples SET state = 'superseded' WHERE {undone}", (step,)),
                (f"UPDATE draws SET fate = 'superseded' WHERE {undone}", (step,)),
                ("DELETE FROM commits WHERE step > ?", (step,)),
            ],
            durable=True,
        )
        self.life += 1
        self.step = step + 1

    def rebuild(self, steps: Mapping[int, str | None], rows: Iterable[Mapping[str, Any]]) -> None:
        """Add commit rows for steps (with the names of their checkpoints) and those of their samples that are not known.

        `rows` are recorded samples. Groups that were dropped without a failure were never recorded and stay unknown.
        """
        now = time.time()
        commits = [
            ("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?)", (step, RECOVERED, name, now)) for step, name in steps.items()
        ]
        self._transaction([*commits, *_recovered(rows)], durable=True)

    def close(self) -> None:
        """Write what was noted, and close."""
        self.flush()
        self.db.close()

    # --- asking ---

    def fates(self, by: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
        """How many samples ended how (or are where), by step and/or domain: (…, state, count)."""
        columns = "".join(f"{'d' if c == 'domain' else 's'}.{c}, " for c in by)
        joined = "samples s JOIN draws d USING (life, draw, attempt)"
        return self.db.execute(
            f"SELECT {columns}s.state, COUNT(*) FROM {joined} GROUP BY {columns}s.state ORDER BY {columns}s.state"
        ).fetchall()

    def of_prompt(self, prompt: str) -> list[dict[str, Any]]:
        """Every attempt at a prompt and every sample of it, oldest first."""
        rows = self.db.execute(
            "SELECT s.life, s.draw, s.attempt, s.place, s.state, s.step, s.reward, s.tokens, s.stop, s.failure, d.reason, s.history "
            "FROM samples s JOIN draws d USING (life, draw, attempt) WHERE d.prompt = ? ORDER BY 1, 2, 3, 4",
            (prompt,),
        )
        names = [c[0] for c in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def reasons(self) -> list[tuple[Any, ...]]:
        """Why groups were dropped: (domain, fate, reason, count)."""
        return self.db.execute(
            "SELECT domain, fate, reason, COUNT(*) FROM draws WHERE reason IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 4 DESC"
        ).fetchall()

    def in_flight(self) -> list[tuple[Any, ...]]:
        """Samples without a fate: under way now, or when the run was killed. (id, domain, state, tokens)."""
        marks = ", ".join("?" * len(FATES))
        return self.db.execute(
            "SELECT s.draw || '.' || s.place, d.domain, s.state, s.tokens FROM samples s "
            f"JOIN draws d USING (life, draw, attempt) WHERE s.state NOT IN ({marks}) ORDER BY s.draw, s.place",
            FATES,
        ).fetchall()

    def problems(self) -> list[str]:
        """What would break exactly-once: a draw trained twice, a committed draw with a sample without fate."""
        twice = self.db.execute(
            "SELECT draw, COUNT(*) FROM draws WHERE fate = 'trained' GROUP BY draw HAVING COUNT(*) > 1"
        ).fetchall()
        settled = self.db.execute(
            "SELECT draw, COUNT(*) FROM draws WHERE fate IN ('trained', 'filtered', 'failed', 'stale') "
            "GROUP BY draw HAVING COUNT(*) > 1"
        ).fetchall()
        open_samples = self.db.execute(
            "SELECT s.draw, s.place, s.state FROM samples s JOIN draws d USING (life, draw, attempt) "
            f"WHERE d.fate IS NOT NULL AND s.state NOT IN ({', '.join('?' * len(FATES))})",
            FATES,
        ).fetchall()
        found = [f"draw {d} was trained {n} times" for d, n in twice] + [f"draw {d} was settled {n} times" for d, n in settled]
        return found + [f"sample {d}.{p} is {state} though its draw has ended" for d, p, state in open_samples]


_ADD_SAMPLE = """INSERT OR REPLACE INTO samples SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11
    WHERE NOT EXISTS (SELECT 1 FROM samples WHERE draw = ?2 AND attempt = ?3 AND place = ?4 AND step = ?11
    AND state <> 'superseded')"""
_ADD_DRAW = """INSERT OR REPLACE INTO draws SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8
    WHERE NOT EXISTS (SELECT 1 FROM draws WHERE draw = ?2 AND attempt = ?3 AND step = ?8 AND fate <> 'superseded')"""


def _recovered(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Inserts for recorded samples and their draws. Of a draw that was never trained the last attempt failed."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        own, _, attempt = row["id"].partition("~")
        draw, _, place = own.partition(".")
        number, tried = int(draw), int(attempt or 0)
        groups.setdefault((number, tried), []).append(row)
        known = (row["fate"], row["stop"], row["reward"], row["tokens"], row["failure"], row["history"], row["step"])
        yield _ADD_SAMPLE, (RECOVERED, number, tried, GREEDY if place == "greedy" else int(place), *known)
    trained = {key for key, samples in groups.items() if any(row["fate"] == Fate.TRAINED for row in samples)}
    settled = dict(sorted(groups)) | dict(trained)  # draw → the attempt that settled it
    for (draw, tried), samples in groups.items():
        newest = samples[-1]
        fate = Fate.TRAINED if (draw, tried) in trained else Fate.FAILED if settled[draw] == tried else Fate.ABORTED
        reason = None if fate is Fate.TRAINED else "rebuilt from the rollouts"
        row = (draw, tried, newest["prompt_id"], newest["domain"], fate.value, reason, newest["step"])
        yield _ADD_DRAW, (RECOVERED, *row)
