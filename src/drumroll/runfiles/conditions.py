"""Conditions on samples as SQLite expressions, such as `reward < 0.5 and domain = 'math'`.

SQLite parses a condition and computes it over a table in memory. It may read the columns of that one table and call
SQLite's functions, and nothing else: no other table, no second query, no change, no file.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from drumroll.errors import DrumrollError, did_you_mean
from drumroll.sample import Owner

TABLE = "samples"
RECORDED = (
    *("step", "kind", "id", "prompt_id", "domain", "prompt", "completion", "columns", "reward", "rewards", "stop", "fate"),
    *("success", "failure", "traceback", "notes", "turns"),
)
"""The recorded columns of a sample that people read; its tokens are not among them."""
GOLD = "answer"
"""The column of a dataset's row that holds the right answer."""
COMPUTED: dict[str, tuple[Sequence[str], Callable[[Mapping[str, Any]], Any]]] = {
    "answer": (("columns",), lambda row: gold(row)),
    "reward": (("reward",), lambda row: number(row["reward"])),
    "turns": (("turns",), lambda row: len(row["turns"])),
    "tokens": (("traces",), lambda row: sum(trace["owners"].count(Owner.POLICY) for trace in row["traces"] or ())),
}
"""Columns of conditions that are not as recorded: the recorded columns that they need, and their value."""


class ConditionError(DrumrollError):
    """A condition that SQLite does not accept."""


class Condition:
    """A condition on rows with these columns. `used` has the columns that it reads."""

    def __init__(self, text: str, columns: Sequence[str]) -> None:
        self.text, self.columns = text, columns
        self.used: set[str] = set()
        self._queries = 0
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._db.execute(f"CREATE TABLE {TABLE} ({', '.join(columns)})")
        self._run(f"SELECT CASE WHEN ({text}\n) THEN 1 END FROM {TABLE}")  # with `_matching`, only an expression fits both
        self._matching()

    def matches(self, rows: Iterable[Mapping[str, Any]]) -> list[int]:
        """Return the positions of the rows for which the condition holds; only the columns in `used` are looked at."""
        used = sorted(self.used)
        names, places = ", ".join(("rowid", *used)), ", ".join("?" * (1 + len(used)))
        values = ((position, *(row[name] for name in used)) for position, row in enumerate(rows))
        self._db.execute(f"DELETE FROM {TABLE}")
        self._db.executemany(f"INSERT INTO {TABLE} ({names}) VALUES ({places})", values)
        return self._matching()

    def _matching(self) -> list[int]:
        # A line end before the bracket, so that a comment cannot hide it.
        return sorted(position for (position,) in self._run(f"SELECT rowid FROM {TABLE} WHERE ({self.text}\n)"))

    def _run(self, query: str) -> list[Any]:
        self._queries = 0
        self._db.set_authorizer(self._allow)
        try:
            return self._db.execute(query).fetchall()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # Python refuses a null character and a second statement
            raise ConditionError(self._explain(str(error).rstrip("."))) from None
        finally:
            self._db.set_authorizer(None)

    def _allow(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_SELECT:
            self._queries += 1
            return sqlite3.SQLITE_OK if self._queries == 1 else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_READ and first == TABLE:
            if second is not None and second in self.columns:
                self.used.add(second)
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and second != "load_extension":
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _explain(self, reason: str) -> str:
        unknown = re.fullmatch(r"no such column: (?:.*\.)?(\w+)", reason)
        hint = did_you_mean(unknown[1], self.columns) if unknown else ""
        return f"'{self.text}' is not a condition on samples: {reason}; the columns are {', '.join(self.columns)}.{hint}"


class SampleCondition(Condition):
    """A condition on recorded samples. `needed` has the recorded columns that it reads."""

    def __init__(self, text: str) -> None:
        super().__init__(text, tuple(dict.fromkeys((*RECORDED, *COMPUTED))))
        self.needed = {name for column in self.used for name in (COMPUTED[column][0] if column in COMPUTED else (column,))}

    @override
    def matches(self, rows: Iterable[Mapping[str, Any]]) -> list[int]:
        return super().matches({column: _value(row, column) for column in self.used} for row in rows)


def _value(row: Mapping[str, Any], column: str) -> Any:
    """A value that is fit for SQLite: lists and mappings become JSON."""
    found = COMPUTED[column][1](row) if column in COMPUTED else row[column]
    if found is None or isinstance(found, float) or (isinstance(found, int) and abs(found) < 2**63):
        return found
    return printable(found if isinstance(found, str) else json.dumps(found, default=str))


def gold(row: Mapping[str, Any]) -> Any:
    """The right answer of a sample's row; None where the dataset has none."""
    columns = row["columns"]
    return columns.get(GOLD) if isinstance(columns, dict) else None


def number(value: float | None) -> float | None:
    """A recorded float32 as it was before: 0.3 and not 0.30000001192."""
    return None if value is None else float(f"{value:.7g}")


def printable(text: str) -> str:
    """A text without lone surrogates, which JSON in a dataset may hold and no file or terminal takes."""
    return text.encode("utf-8", "replace").decode()
