"""Shows a run in the terminal while it trains: a live panel on a TTY, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from typing_extensions import override

from drumroll.config import RunConfig
from drumroll.runfiles.reader import RunReader

Metrics = Mapping[str, float]


class Progress(Protocol):
    """Receives the events of a session that a person wants to see."""

    def begin(self, step: int, before: Metrics) -> None: ...
    def stage(self, name: str) -> None: ...
    def committed(self, step: int, metrics: Metrics) -> None: ...
    def notice(self, text: str) -> None: ...
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Shows nothing; the default from Python."""

    def begin(self, step: int, before: Metrics) -> None: ...
    def stage(self, name: str) -> None: ...
    def committed(self, step: int, metrics: Metrics) -> None: ...
    def notice(self, text: str) -> None: ...
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Plain(Quiet):
    """Prints one line per step, for logs and pipes."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.began = time.monotonic()
        self.first = 0

    @override
    def begin(self, step: int, before: Metrics) -> None:
        self.first, self.began = step, time.monotonic()
        shown = "  ".join(f"{name} {value:.3f}" for name, value in before.items() if "pass@" not in name)
        self.say(f"step {step}/{self.config.steps}  {shown}")

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        eta = (time.monotonic() - self.began) / max(1, step - self.first) * (self.config.steps - step)
        self.say(f"step {step}/{self.config.steps}  {'  '.join(f'{n} {v}' for n, v in headline(metrics))}  eta {eta:.0f}s")

    @override
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None:
        self.console.print(ending(run, summary))

    @override
    def notice(self, text: str) -> None:
        self.say(text)

    def say(self, line: str) -> None:
        """Print without wrapping or markup."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class Screen(Plain):
    """Shows a live panel: progress bar with ETA, rewards per domain, speed, time per stage."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        super().__init__(config, console)
        self.bar = Bar(
            TextColumn("[bold]{task.fields[stage]:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("train", total=config.steps, stage="loading")
        self.latest: dict[str, float] = {}
        self.live = Live(self._panel(), console=console, refresh_per_second=8, transient=True)
        self.live.start()

    @override
    def begin(self, step: int, before: Metrics) -> None:
        self.bar.reset(self.task, completed=step, stage="start")
        self.latest.update(before)
        self.live.update(self._panel())

    @override
    def stage(self, name: str) -> None:
        self.bar.update(self.task, stage=name)

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        self.latest.update(metrics)
        self.bar.update(self.task, completed=step)
        self.live.update(self._panel())

    @override
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None:
        self.close()
        super().finish(run, summary)

    @override
    def close(self) -> None:
        self.live.stop()

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 3))
        groups = {
            "reward": {n.removeprefix("reward/"): v for n, v in self.latest.items() if n.startswith("reward/")},
            "success": {
                n.split("/")[1]: v for n, v in self.latest.items() if n.startswith("environment/") and n.endswith("/success")
            },
            "held out": {n.removeprefix("eval/"): v for n, v in self.latest.items() if _held_out(n)},
            "train": {n.removeprefix("train/"): self.latest[n] for n in TRAIN if n in self.latest},
            "speed": {n: self.latest[n] for n in ("rollout/tokens_per_s", "time/tokens_per_s") if n in self.latest},
            "seconds": {n.removeprefix("time/"): v for n, v in self.latest.items() if n in STAGES},
        }
        for title, values in groups.items():
            if values:
                table.add_row(f"[dim]{title}", "   ".join(f"{n} [bold]{v:.4g}[/]" for n, v in values.items()))
        return Group(self.bar, table)


TRAIN = ("train/loss", "train/accuracy", "train/margin", "train/entropy", "train/kl", "train/grad_norm", "train/mismatch")
STAGES = tuple(f"time/{name}" for name in ("rollout", "infer", "train", "publish", "eval", "checkpoint"))

DETAILS = ("/effective", "/malformed", "/turns", "/reward_chosen", "/reward_rejected", "/logprob_chosen", "/logprob_rejected")
"""Ends of the names of held-out metrics that are no scores."""


def _held_out(name: str) -> bool:
    """Whether a metric is a score of a held-out set; pass@k and facts about episodes other than success are not."""
    return name.startswith("eval/") and "@" not in name and not name.endswith(DETAILS)


def headline(metrics: Metrics) -> list[tuple[str, str]]:
    """Return the few metrics of a step that fit a line."""
    names = [n for n in metrics if n.startswith("reward/") and n.count("/") == 1]
    names += [n for n in metrics if n.startswith("environment/") and n.endswith("/success")]
    names += [n for n in metrics if _held_out(n)]
    train = ("train/loss", "train/accuracy", "train/margin", "train/entropy", "train/mismatch")
    names += [n for n in (*train, "time/tokens_per_s", *STAGES) if n in metrics]
    return [(n.removeprefix("train/"), f"{metrics[n]:.3g}") for n in names]


def ending(run: RunReader, summary: Mapping[str, Any]) -> Group:
    """Show the run's path, its scores before and after, and the command that shows its samples."""
    kinds = {"score": "", **{kind: f"_{kind}" for kind in ("sampled", "success", "effective", "turns")}}
    shown = {label: suffix for label, suffix in kinds.items() if summary.get(f"before{suffix}")}
    table = Table("held out", *shown)
    for name in summary["before"]:
        cells = ([summary.get(f"{when}{suffix}", {}).get(name) for when in ("before", "after")] for suffix in shown.values())
        table.add_row(name, *("–" if None in pair else "{:.3f} → {:.3f}".format(*pair) for pair in cells))
    title = f"{summary['name']}: {summary['steps']} steps in {summary['seconds']:.0f} s"
    lines = f"run      {run.path}\nmodel    {run.model_path}\nreport   {run.path / 'report.html'}\nlook     drumroll run samples {run.path}"
    return Group(title, table, lines) if summary["before"] else Group(lines)


def for_console(config: RunConfig, console: Console) -> Progress:
    """Return a live panel for a terminal, plain lines for anything else."""
    return Screen(config, console) if console.is_terminal else Plain(config, console)
