"""Finds recorded samples and shows them: gold answer, reward parts, whole dialogue.

The terminal, `--json` and the report show the same rows. Only the files, columns and tokens that are asked for are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from drumroll.observe.dialogue import Message, open_decoder, sample_dialogue
from drumroll.observe.failures import by_cause
from drumroll.runfiles.conditions import RECORDED, SampleCondition, gold, number, printable
from drumroll.runfiles.reader import RunReader
from drumroll.runfiles.rollouts import RolloutFile

Row = dict[str, Any]
CONTROLS = {i: 0x2400 + i for i in range(32) if i not in (9, 10)} | {0x7F: 0x2421}
"""Control characters and the pictures shown for them (␀, ␛, ...): a model's text must not control a terminal or a browser."""
SHORT = 240
"""Characters of a text in the table; `--full` shows all."""


def find_samples(
    run: RunReader,
    *,
    step: int | None = None,
    kind: str | None = None,
    domain: str | None = None,
    where: str | None = None,
    limit: int = 20,
) -> list[Row]:
    """Return samples of a step: the given one, or the newest with some; with a condition, of as many steps as are needed."""
    condition = None if where is None else SampleCondition(where)
    files = sorted(run.rollouts(step=step, kind=kind), key=lambda file: (-file.step, file.kind != "train"))
    found: list[Row] = []
    for file in files:
        if len(found) >= limit or (found and condition is None and file.step != found[0]["step"]):
            break
        found += islice(_of_file(run, file, domain, condition), limit - len(found))
    return with_dialogues(run, found)


def _of_file(run: RunReader, file: RolloutFile, domain: str | None, condition: SampleCondition | None) -> Iterator[Row]:
    """Yield the rows of a file; those that a condition does not want are read no further than it needs."""
    chosen = {"step": file.step, "kind": file.kind, "domain": domain}
    if condition is None:
        yield from run.select(RECORDED, **chosen)
        return
    keys = ("id", "prompt_id")
    rows = list(run.select(tuple(dict.fromkeys((*keys, *condition.needed))), **chosen))
    hits = [tuple(rows[i][key] for key in keys) for i in condition.matches(rows)]
    wanted = set(hits)
    for row in run.select(RECORDED, **chosen, ids={name for name, _ in hits}) if hits else ():
        if (row["id"], row["prompt_id"]) in wanted:
            yield row


def with_dialogues(run: RunReader, rows: Sequence[Row]) -> list[Row]:
    """Add the gold answer and the dialogue to rows of the columns `RECORDED`; tokens of other samples are not read."""
    decoder = open_decoder(run) if rows else None
    traces: dict[tuple[Any, ...], Any] = {}
    for step, kind in dict.fromkeys((row["step"], row["kind"]) for row in rows) if decoder else ():
        ids = {row["id"] for row in rows if (row["step"], row["kind"]) == (step, kind)}
        for row in run.select(("id", "prompt_id", "traces"), ids=ids, step=step, kind=kind):
            traces[step, kind, row["id"], row["prompt_id"]] = row["traces"]

    def dialogue(row: Row) -> list[Message]:
        return sample_dialogue(row, traces.get((row["step"], row["kind"], row["id"], row["prompt_id"])), decoder)

    return [{**row, "reward": number(row["reward"]), "answer": gold(row), "dialogue": dialogue(row)} for row in rows]


def json_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield each row as a JSON object."""
    for row in rows:
        yield printable(json.dumps(row, ensure_ascii=False, default=str))


# --- for people ---


def sample_table(run: RunReader, rows: Sequence[Row]) -> Group:
    """Show samples as a table, long texts cut. Each kind of failure shows its traceback once."""
    steps = sorted({row["step"] for row in rows})
    title = f"{run.path}, " + (
        f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}–{steps[-1]}" if steps else "no samples"
    )
    table = Table(title=Text(title), title_justify="left")
    for column in ("sample", "domain", "dialogue", "gold", "reward", "stop", "fate"):
        table.add_column(column, overflow="fold")
    for row in rows:
        name = row["id"] if len(steps) == 1 else f"{row['step']}: {row['id']}"
        reward = row["failure"] or "–" if row["reward"] is None else rewards_text(row)
        texts = (visible(row["domain"]), _short_dialogue(row["dialogue"]), shortened(gold_text(row)), visible(reward))
        table.add_row(Text(f"{name}\n{row['kind']}"), *texts, row["stop"] or "–", row["fate"] or "–")
    failed = by_cause((r["id"], r["failure"], r["traceback"] or "") for r in rows if r["failure"])
    tracebacks = (f"{t.count} failed; the first is {t.first}: {t.describe()}" for t in failed if t.traceback)
    more = 'drumroll run samples --full shows whole texts, --where "reward < 0.5" selects, --json prints objects'
    return Group(table, *(visible(text) for text in tracebacks), Text(more, style="dim"))


def full_samples(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Yield everything of each sample, one under another."""
    if not rows:
        yield "no samples"
    for row in rows:
        yield Rule(visible(f"step {row['step']} {row['kind']} · sample {row['id']} · {row['domain']}"), align="left")
        for message in row["dialogue"]:
            yield Text(message["role"], style="bold")
            yield visible(message["content"])
        facts = {"gold": gold_text(row), "reward": rewards_text(row), "stop": row["stop"], "fate": row["fate"]}
        facts |= {"failure": row["failure"], "traceback": row["traceback"], "notes": "\n".join(row["notes"] or ())}
        table = Table.grid(padding=(0, 2))
        for name, text in facts.items():
            if text:
                table.add_row(Text(name, style="bold"), visible(str(text)))
        yield table


def gold_text(row: Row) -> str:
    """The gold answer as text; empty where the dataset has none."""
    gold = row["answer"]
    return "" if gold is None else gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False, default=str)


def rewards_text(row: Row) -> str:
    """The reward, and its parts where there are several or one differs from it."""
    if row["reward"] is None:
        return "–"
    parts = row["rewards"] or {}
    lines = [f"{row['reward']:.4g}"]
    if len(parts) > 1 or any(abs(value - row["reward"]) > 1e-6 for value in parts.values()):
        lines += [f"{name} {value:.4g}" for name, value in parts.items()]
    return "\n".join(lines)


def visible(text: str) -> Text:
    """A text for the terminal: no markup, and control characters as pictures."""
    return Text(printable(text).translate(CONTROLS))


def shortened(text: str, most: int = SHORT) -> Text:
    """A text for the terminal with its middle cut out if it is long."""
    return visible(text if len(text) <= most else f"{text[: most * 2 // 3]} […] {text[-most // 3 :]}")


def _short_dialogue(dialogue: Sequence[Message]) -> Text:
    """The first turns and the last ones, each cut."""
    left_out = len(dialogue) - 6
    shown = dialogue if left_out <= 0 else [*dialogue[:3], {"role": "…", "content": f"{left_out} turns"}, *dialogue[-3:]]
    lines = [Text.assemble((f"{m['role']} ", "bold"), shortened(m["content"])) for m in shown]
    return Text("\n").join(lines)
