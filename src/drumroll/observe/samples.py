"""A table of recorded samples for the terminal, and the tracebacks of those that failed."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drumroll.observe.failures import by_cause
from drumroll.store.run import Run


def sample_table(run: Run, step: int | None, kind: str | None, domain: str | None, limit: int) -> Group:
    """The samples of one step: the asked one, or the last recorded. Each kind of failure has its traceback once."""
    rows = [r for r in run.iter_samples() if (kind or r["kind"]) == r["kind"] and (domain or r["domain"]) == r["domain"]]
    chosen = max((r["step"] for r in rows), default=0) if step is None else step
    table = Table(title=f"{run.path}, step {chosen}", title_justify="left")
    for column in ("sample", "kind", "domain", "prompt", "completion", "reward", "stop", "fate"):
        table.add_column(column, overflow="fold")
    rows = [r for r in rows if r["step"] == chosen]
    for row in rows[:limit]:
        reward = escape(row["failure"] or "–") if row["reward"] is None else f"{row['reward']:.3g}"
        texts = (row["id"], row["kind"], row["domain"], row["prompt"], row["completion"])
        table.add_row(*(escape(t) for t in texts), reward, row["stop"] or "–", row["fate"] or "–")
    failed = by_cause((r["id"], r["failure"], r.get("traceback") or "") for r in rows if r["failure"])
    tracebacks = (f"{t.count} failed; the first is {t.first}: {t.told()}" for t in failed if t.traceback)
    return Group(table, *(Text(text) for text in tracebacks))
