"""Shows a ledger as tables in the terminal."""

from __future__ import annotations

import json

from rich.markup import escape
from rich.table import Table

from drumroll.errors import StoreError
from drumroll.runfiles.ledger_queries import LedgerReader


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


NO_DRAWS = "the ledger has no draws: supervised runs draw no prompts, and other runs have none before their first rollout"


def summary_tables(ledger: LedgerReader, by: tuple[str, ...]) -> list[Table | str]:
    """Count samples by fate and dropped groups by reason, and say whether the ledger is consistent."""
    if not ledger.draws():
        return [NO_DRAWS]
    counts = _table("samples", *by, "fate or state", "count")
    for row in ledger.fates(by):
        counts.add_row(*("–" if value is None else str(value) for value in row))
    reasons = _table("groups dropped", "domain", "fate", "reason", "count")
    for row in ledger.reasons():
        reasons.add_row(*(escape(str(value)) for value in row))
    problems = ledger.problems()
    verdict = "the ledger is consistent: every ended draw has one fate, none was trained twice"
    return [counts, *([reasons] if reasons.row_count else []), *(problems or [verdict])]


def prompt_table(ledger: LedgerReader, prompt: str) -> list[Table | str]:
    """List every sample of a prompt, with its history."""
    rows = ledger.of_prompt(prompt)
    if not rows:
        raise StoreError(f"the ledger knows no prompt '{prompt}'; ids are in the prompt_id column of rollouts/*.parquet.")
    table = _table(f"prompt {prompt}", "life", "sample", "fate", "step", "reward", "tokens", "why", "history (seconds)")
    for row in rows:
        history = json.loads(row["history"])
        began = history[0][1] if history else 0.0
        path = " → ".join(f"{state} {at - began:.2f}" for state, at in history)
        name = f"{row['draw']}.{row['sample']}" + (f"~{row['attempt']}" if row["attempt"] else "")
        shown = (row["life"], name, row["state"], row["step"], row["reward"], row["tokens"], row["failure"] or row["reason"])
        table.add_row(*("–" if v is None else escape(str(v)) for v in shown), path)
    return [table]


def flight_table(ledger: LedgerReader) -> list[Table | str]:
    """List the samples without a fate."""
    rows = ledger.in_flight()
    if not rows:
        return ["nothing is in flight"]
    table = _table("in flight", "sample", "domain", "state", "tokens")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return [table]
