"""Shows recorded samples as a table in the terminal, with the tracebacks of those that failed."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drumroll.observe.failures import by_cause
from drumroll.runfiles.reader import RunReader

COLUMNS = ("step", "kind", "id", "domain", "prompt", "completion", "reward", "stop", "fate", "failure", "traceback")


def sample_table(run: RunReader, step: int | None, kind: str | None, domain: str | None, limit: int) -> Group:
    """Show the samples of a step: the given one, or the last recorded. Each kind of failure shows its traceback once."""
    recorded = sorted({file.step for file in run.rollouts(kind=kind)}, reverse=True) if step is None else [step]
    found = ((s, list(run.select(COLUMNS, step=s, kind=kind, domain=domain))) for s in recorded)
    chosen, rows = next(((s, rows) for s, rows in found if rows), (step or 0, []))
    table = Table(title=f"{run.path}, step {chosen}", title_justify="left")
    for column in ("sample", "kind", "domain", "prompt", "completion", "reward", "stop", "fate"):
        table.add_column(column, overflow="fold")
    for row in rows[:limit]:
        reward = escape(row["failure"] or "–") if row["reward"] is None else f"{row['reward']:.3g}"
        texts = (row["id"], row["kind"], row["domain"], row["prompt"], row["completion"])
        table.add_row(*(escape(t) for t in texts), reward, row["stop"] or "–", row["fate"] or "–")
    failed = by_cause((r["id"], r["failure"], r["traceback"] or "") for r in rows if r["failure"])
    tracebacks = (f"{t.count} failed; the first is {t.first}: {t.describe()}" for t in failed if t.traceback)
    return Group(table, *(Text(text) for text in tracebacks))
