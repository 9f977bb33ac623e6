"""Scores the recorded samples of a run again, with the rewards of a changed config."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from drumroll.components import open_scorer
from drumroll.config import RunConfig
from drumroll.errors import StoreError
from drumroll.processes.pool import KillablePool
from drumroll.registry import search
from drumroll.rewards import Scorer
from drumroll.rewards.group_calls import GroupCalls
from drumroll.runfiles.format import RESCORED
from drumroll.runfiles.reader import RunReader
from drumroll.runfiles.rollouts import read_samples, write_rows
from drumroll.sample import ENVIRONMENT, Owner, Prompt, Sample, StopReason, Trace, parse_id
from drumroll.workers.runtime import open_workers

AT_ONCE = 16
"""The number of groups that are scored at a time."""


async def rescore(run: RunReader, config: RunConfig) -> Table:
    """Score every recorded sample again, write the rows to `rescored/`, and return a table of old and new rewards."""
    files = [file.path for file in run.rollouts()]
    if not files:
        raise StoreError(f"{run.path} has no recorded rollouts to score again.")
    search(config.import_from)
    asks = config.roles.judge is not None or config.roles.reward_model is not None
    workers = await open_workers(config) if asks else None  # other rewards need no model
    rollout = config.rollout_section()
    pool = KillablePool(rollout.reward_workers)
    scorer = (
        open_scorer(config, workers, rollout)
        if workers is not None
        else Scorer(config.rewards(), rollout.reward_timeout, pool, sandbox=config.sandbox, steps=config.steps)
    )
    counts: dict[str, dict[str, float]] = {}
    try:
        for file in files:
            rows = await _rescored(list(read_samples(file)), scorer)
            for before, after in rows:
                _count(
                    counts.setdefault(before["domain"], dict.fromkeys(("samples", "before", "after", "changed"), 0.0)),
                    before,
                    after,
                )
            write_rows(run.path / RESCORED / file.name, [after for _, after in rows])
    finally:
        await scorer.close()
        if workers is not None:
            await workers.close()
    return _table(run.path, counts)


async def _rescored(rows: list[dict[str, Any]], scorer: Scorer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Score the rows of a file; return each as it was and as it is now."""
    samples = [_sample(row) for row in rows]
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    seen: Counter[tuple[str, str]] = Counter()  # held-out sets may share prompts, and so ids
    for row, sample in zip(rows, samples, strict=True):
        seen[sample.prompt.id, sample.id] += 1
        # a sample that failed before its rewards was not scored with the others
        alone = row["failure"] and not row["failure"].partition(" in ")[2].startswith("reward")
        key = (sample.prompt.id, sample.draw, sample.attempt, seen[sample.prompt.id, sample.id], alone and sample.index)
        groups.setdefault(key, []).append(sample)
    limit = asyncio.Semaphore(AT_ONCE)

    async def together(members: list[Sample]) -> None:
        async with limit:
            calls = GroupCalls(s.index for s in members)
            await asyncio.gather(*(_score(sample, scorer, calls) for sample in members))

    await asyncio.gather(*map(together, groups.values()))
    return [(row, _after(row, sample)) for row, sample in zip(rows, samples, strict=True)]


def _sample(row: Mapping[str, Any]) -> Sample:
    """The sample that a row records, without its rewards; an episode keeps its environment's, since it is not replayed."""
    content = row["prompt"]
    messages = tuple(json.loads(content)) if content.startswith("[{") else content
    prompt = Prompt(row["prompt_id"], row["domain"], messages, (), row["columns"])
    draw, index, attempt = parse_id(row["id"])
    sample = Sample(prompt, draw, index, attempt=attempt)
    sample.completion, sample.stop = row["completion"], StopReason(row["stop"]) if row["stop"] else None
    sample.rewards = {name: value for name, value in row["rewards"].items() if name == ENVIRONMENT}
    sample.traces = [Trace(t["tokens"], [Owner(o) for o in t["owners"]], t["logprobs"], t["versions"]) for t in row["traces"]]
    return sample


async def _score(sample: Sample, scorer: Scorer, calls: GroupCalls) -> None:
    await scorer.score(sample, calls)
    calls.leave(sample)


def _after(row: dict[str, Any], sample: Sample) -> dict[str, Any]:
    failure = sample.failure
    told = {"failure": str(failure), "traceback": failure.traceback} if failure else {"failure": None, "traceback": None}
    return {**row, "reward": sample.reward, "rewards": sample.rewards, "extra": sample.extra, **told}


def _count(total: dict[str, float], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    old, new = before["reward"] or 0.0, after["reward"] or 0.0
    total["samples"] += 1
    total["before"] += old
    total["after"] += new
    total["changed"] += abs(old - new) > 1e-6


def _table(run: Path, counts: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"{run}: samples scored again, kept in {RESCORED}/", title_justify="left")
    table.add_column("domain")
    for column in ("samples", "reward before", "reward now", "changed"):
        table.add_column(column, justify="right")
    for domain, total in sorted(counts.items()):
        n = total["samples"]
        table.add_row(
            domain, f"{n:.0f}", f"{total['before'] / n:.4f}", f"{total['after'] / n:.4f}", f"{total['changed'] / n:.1%}"
        )
    return table
