"""Questions to a run's `ledger.sqlite`: fates, reasons, samples in flight, commits, checkpoints. It never writes.

`store.ledger` has the schema and the writer.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from drumroll.errors import StoreError
from drumroll.sample import Fate

FATES = tuple(fate.value for fate in Fate)


def connect(path: Path, options: str) -> sqlite3.Connection:
    """Open a ledger with options of SQLite's URI, such as `mode=ro`; every statement is its own transaction."""
    return sqlite3.connect(f"{path.resolve().as_uri()}?{options}", uri=True, isolation_level=None)


class LedgerReader:
    """Reads a ledger, also while another process writes it or begins to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db, self._frozen = self._open()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection. One to a ledger without a writer is opened anew when a writer has changed the file."""
        if self._frozen is not None and self._frozen != self._stamp():
            self._db.close()
            self._db, self._frozen = self._open()
        return self._db

    def _stamp(self) -> tuple[bool, int, int]:
        """What changes when a process writes the ledger: whether it has a write-ahead log, its time and its size."""
        state = self.path.stat()
        return self.path.with_name(f"{self.path.name}-wal").exists(), state.st_mtime_ns, state.st_size

    def _open(self) -> tuple[sqlite3.Connection, tuple[bool, int, int] | None]:
        """Connect; returns also the state of a file that no process writes."""
        missing = (
            f"{self.path.parent} has no ledger: no step of it has begun, the file was removed, or `drumroll rollout` made it."
        )
        if not self.path.exists():
            raise StoreError(missing)
        # A ledger without a write-ahead log has no writer. SQLite then needs no files of its own beside it,
        # so that a run on a read-only disk can be read, and reading leaves nothing in the run directory.
        stamp = self._stamp()
        live = stamp[0]
        try:
            db = connect(self.path, "mode=ro" if live else "mode=ro&immutable=1")
            if db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'draws'").fetchone() == (0,):
                raise StoreError(missing)
        except sqlite3.Error as error:
            raise StoreError(f"cannot open the ledger {self.path}: {error}.") from error
        return db, None if live else stamp

    def one(self, query: str, *values: Any) -> Any:
        """Return the first value of a query."""
        row = self.db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        """Close the ledger."""
        self.db.close()

    def committed(self) -> set[int]:
        """Return the steps that have a commit row."""
        return {step for (step,) in self.db.execute("SELECT step FROM commits")}

    def checkpoints(self) -> dict[int, str]:
        """Return the names of all checkpoints that were completed, by step, oldest first; pruned ones are included."""
        return dict(self.db.execute("SELECT step, name FROM checkpoints ORDER BY step, life").fetchall())

    def draws(self) -> int:
        """Count the attempts at draws; a supervised run has none."""
        return self.one("SELECT COUNT(*) FROM draws")

    def fates(self, by: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
        """Count samples by fate (or state, if they have no fate), and by step and/or domain: (…, state, count)."""
        columns = "".join(f"{'d' if c == 'domain' else 's'}.{c}, " for c in by)
        joined = "samples s JOIN draws d USING (life, draw, attempt)"
        return self.db.execute(
            f"SELECT {columns}s.state, COUNT(*) FROM {joined} GROUP BY {columns}s.state ORDER BY {columns}s.state"
        ).fetchall()

    def of_prompt(self, prompt: str) -> list[dict[str, Any]]:
        """Return every sample of every attempt at a prompt, oldest first."""
        rows = self.db.execute(
            "SELECT s.life, s.draw, s.attempt, s.sample, s.state, s.step, s.reward, s.tokens, s.stop, s.failure, d.reason, s.history "
            "FROM samples s JOIN draws d USING (life, draw, attempt) WHERE d.prompt = ? ORDER BY 1, 2, 3, 4",
            (prompt,),
        )
        names = [c[0] for c in rows.description]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def reasons(self) -> list[tuple[Any, ...]]:
        """Count dropped groups by reason: (domain, fate, reason, count)."""
        return self.db.execute(
            "SELECT domain, fate, reason, COUNT(*) FROM draws WHERE reason IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 4 DESC"
        ).fetchall()

    def in_flight(self) -> list[tuple[Any, ...]]:
        """Return samples without a fate, under way now or when the run was killed: (id, domain, state, tokens)."""
        marks = ", ".join("?" * len(FATES))
        return self.db.execute(
            "SELECT s.draw || '.' || s.sample, d.domain, s.state, s.tokens FROM samples s "
            f"JOIN draws d USING (life, draw, attempt) WHERE s.state NOT IN ({marks}) ORDER BY s.draw, s.sample",
            FATES,
        ).fetchall()

    def problems(self) -> list[str]:
        """Describe every break of exactly-once: a draw trained twice, a committed draw with a sample without fate."""
        twice = self.db.execute(
            "SELECT draw, COUNT(*) FROM draws WHERE fate = 'trained' GROUP BY draw HAVING COUNT(*) > 1"
        ).fetchall()
        settled = self.db.execute(
            "SELECT draw, COUNT(*) FROM draws WHERE fate IN ('trained', 'filtered', 'failed', 'stale') "
            "GROUP BY draw HAVING COUNT(*) > 1"
        ).fetchall()
        open_samples = self.db.execute(
            "SELECT s.draw, s.sample, s.state FROM samples s JOIN draws d USING (life, draw, attempt) "
            f"WHERE d.fate IS NOT NULL AND s.state NOT IN ({', '.join('?' * len(FATES))})",
            FATES,
        ).fetchall()
        found = [f"draw {d} was trained {n} times" for d, n in twice] + [f"draw {d} was settled {n} times" for d, n in settled]
        return found + [f"sample {d}.{p} is {state} though its draw has ended" for d, p, state in open_samples]
