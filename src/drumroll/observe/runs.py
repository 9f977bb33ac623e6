"""Tells the state and the result of runs from their files: `drumroll runs`, `drumroll run status`, the report.

Nothing here imports torch or reads a model.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from drumroll.config.best import MEASURED
from drumroll.errors import StoreError
from drumroll.runfiles.format import CONFIG, METRICS
from drumroll.runfiles.reader import RunReader
from drumroll.store.lock import in_use

HELD_OUT = re.compile(rf"eval/([^/]+(?:/[^/]+(?=/accuracy$))?)(?:/(sampled|{'|'.join(MEASURED)}))?")
"""Names of metrics that are scores, losses or accuracies of held-out sets, or accuracies of a set's domains (`set/domain`)."""
DEPTH = 3
"""How many folders deep runs are looked for."""
STYLES = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow"}


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """Return a value of a plain config by its dotted key; None if this config has no such key."""
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def state_of(run: RunReader) -> str:
    """Return `running`, `finished`, `failed`, `interrupted` (by Ctrl-C, or killed), or `rollouts` of a run that never trains."""
    if in_use(run.path):
        return "running"
    if run.summary:
        return "finished"
    if not (run.path / METRICS).exists() and run.rollouts():
        return "rollouts"
    return str(run.outcome.get("state", "interrupted"))


def model_text(run: RunReader) -> str:
    """Say which step `model/` holds, and how to get the best one if that is another."""
    summary, best = run.summary, run.checkpoints.best()
    export = f"drumroll run export {run.path} --step best --to DIR"
    if not run.model_path.exists():
        return f"none yet; {export} exports a checkpoint" if run.checkpoints.steps() else "none yet"
    if not summary:
        return "of an earlier end: the run was resumed since"
    last = f"step {summary.get('steps')}, the last"
    if best is None:
        return f"{last} (no held-out set says which was best)"
    score = f"{best.get('by', 'score')} {best['score']:.3f}"
    if best["step"] == summary.get("steps"):
        return f"{last} and the best ({score})"
    return f"{last}; the best was step {best['step']} ({score}): {export}"


def describe_run(run: RunReader) -> dict[str, Any]:
    """Return what `drumroll runs` knows of a run, as plain data."""
    settings, metrics, summary, outcome = run.settings, run.metrics, run.summary, run.outcome
    evaluations, rewards = ([found for line in metrics if (found := _named(line, area))] for area in ("eval", "reward"))
    state = state_of(run)
    newest = max(path.stat().st_mtime for path in (run.path / METRICS, run.path / CONFIG) if path.exists())
    return {
        "path": str(run.path),
        "name": settings.get("name", run.path.name),
        "state": state,
        "step": int(metrics[-1]["step"]) if metrics else 0,
        "steps": settings.get("steps"),
        "pipeline": settings.get("pipeline"),
        "model": settings.get("model"),
        "before": summary.get("before") or (evaluations[0] if evaluations else {}),
        "after": summary.get("after") or (evaluations[-1] if len(evaluations) > 1 else {}),
        "reward": rewards[-1] if rewards else {},
        "best_step": run.checkpoints.best_step(),
        "seconds": summary.get("seconds"),
        "updated": newest,
        "error": outcome.get("error") if state == "failed" else None,
    }


def _named(line: Mapping[str, float], area: str) -> dict[str, float]:
    """The metrics `area/<name>` of a step, by name; where there are none, losses and accuracies of held-out sets."""

    def matching(pattern: str) -> dict[str, float]:
        return {" ".join(found.groups()): v for key, v in line.items() if (found := re.fullmatch(f"{area}/{pattern}", key))}

    return matching("([^/@]+)") or matching("([^/@]+)/(accuracy|loss)")


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Describe the runs in a folder and below, newest last; one that cannot be read has the state `unreadable`."""
    if not folder.is_dir():
        raise StoreError(f"there is no directory {folder}; name the one that holds your runs: drumroll runs DIR.")
    found = []
    for path in _run_folders(folder, DEPTH):
        try:
            found.append(describe_run(RunReader.open(path)))
        except (StoreError, OSError, ValueError) as error:
            updated = (path / CONFIG).stat().st_mtime
            found.append({"path": str(path), "state": "unreadable", "updated": updated, "error": str(error)})
    return sorted(found, key=lambda run: run["updated"])


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / CONFIG).is_file():
        yield folder
    elif depth:
        inside = [entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
        for path in sorted(inside):
            yield from _run_folders(Path(path), depth - 1)


def runs_table(runs: list[dict[str, Any]], folder: Path) -> Table | str:
    """Show runs as a table: state, step, result, age."""
    if not runs:
        return f"{folder} holds no runs"
    table = Table("run", "state", "step", "result", "age")
    for run in runs:
        path = Path(run["path"])
        name = str(path.relative_to(folder)) if path != folder and path.is_relative_to(folder) else str(path)
        step = f"{run['step']}/{run['steps'] or '?'}" if "step" in run else "–"
        state = Text(run["state"], style=STYLES.get(run["state"], ""))
        table.add_row(Text(name), state, step, Text(result_text(run)), duration(time.time() - run["updated"]))
    return table


def result_text(run: Mapping[str, Any]) -> str:
    """A run's result in a line: its error, its held-out scores before and after, or its newest rewards."""
    if run.get("error"):
        return str(run["error"])
    before, after = run.get("before") or {}, run.get("after") or {}
    pairs = [f"{name} {before[name]:.3f} → {value:.3f}" for name, value in after.items() if name in before]
    scores = pairs or [f"{name} {value:.3f}" for name, value in before.items()]
    return ", ".join(scores or [f"reward {name} {value:.3f}" for name, value in (run.get("reward") or {}).items()])


def duration(seconds: float) -> str:
    """A time span for people: 12 s, 3 min, 5 h, 2 days."""
    for unit, size, below in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 86400)):
        if seconds < below:
            return f"{max(0, seconds) / size:.0f} {unit}"
    days = round(seconds / 86400)
    return f"{days} day{'s' if days > 1 else ''}"
