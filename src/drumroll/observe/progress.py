"""Shows a run in the terminal while it trains: a live screen on a TTY, one aligned line per step elsewhere, nothing when quiet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from drumroll.config import RunConfig
from drumroll.config.best import MEASURED, lower_is_better
from drumroll.observe.headline import Number, numbers, rank
from drumroll.observe.legend import meaning
from drumroll.observe.runs import duration, model_text
from drumroll.observe.samples import shortened, visible
from drumroll.runfiles.conditions import GOLD
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Sample

Metrics = Mapping[str, float]


class Progress(Protocol):
    """Receives the events of a session that a person wants to see."""

    def begin(self, step: int, before: Metrics) -> None: ...
    def stage(self, name: str) -> None: ...
    def committed(self, step: int, metrics: Metrics) -> None: ...
    def sampled(self, step: int, samples: Sequence[Sample]) -> None: ...
    def notice(self, text: str) -> None: ...
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Shows nothing; the default from Python."""

    def begin(self, step: int, before: Metrics) -> None: ...
    def stage(self, name: str) -> None: ...
    def committed(self, step: int, metrics: Metrics) -> None: ...
    def sampled(self, step: int, samples: Sequence[Sample]) -> None: ...
    def notice(self, text: str) -> None: ...
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Plain(Quiet):
    """Prints one line per step, for logs and pipes; `verbose`: every metric below it, with its meaning at the first step."""

    def __init__(self, config: RunConfig, console: Console, *, verbose: bool = False) -> None:
        self.config = config
        self.console = console
        self.verbose = verbose
        self.began = time.monotonic()
        self.first = 0
        self._columns: dict[str, tuple[int, int]] = {}  # label → place in the line, width
        self._explained: set[str] = set()

    @override
    def begin(self, step: int, before: Metrics) -> None:
        self.first, self.began = step, time.monotonic()
        self.say(f"{self._count(step)}  {self._line(numbers(before), '')}".rstrip())

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        left = (time.monotonic() - self.began) / max(1, step - self.first) * (self.config.steps - step)
        found = numbers(metrics)
        self.say(f"{self._count(step)}  {self._line(found, duration(left))}".rstrip())
        if self.verbose:
            self._everything(metrics)
        elif not self._explained:
            shown = [n for n in found if n.label in ("length", "mismatch", "KL to reference", "loss")]
            legend = "  ".join(f"{n.label}: {meaning(n.metric)}" for n in shown)
            self._explained.add("")
            self.say(f"({legend}  drumroll train -v shows every metric.)")

    @override
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None:
        table, lines = ending(run, summary)
        self.say(lines[0])
        if table is not None:
            self.console.print(table)
        for line in lines[1:]:
            self.say(line)

    @override
    def notice(self, text: str) -> None:
        self.say(text)

    def say(self, line: str) -> None:
        """Print without wrapping or markup."""
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _count(self, step: int) -> str:
        return f"step {f'{step}/{self.config.steps}':<{2 * len(str(self.config.steps)) + 1}}"

    def _line(self, found: Sequence[Number], eta: str) -> str:
        """The numbers in columns that stay where they are; a number that this step does not have leaves its column blank."""
        texts = {number.label: number.text for number in found}
        for number in found:
            self._columns.setdefault(number.label, (rank(number), len(number.text)))
        cells: list[tuple[float, str]] = []
        for label, (place, width) in sorted(self._columns.items(), key=lambda column: column[1][0]):
            cell = f"{label} {texts[label]:>{width}}" if label in texts else " " * (len(label) + 1 + width)
            cells.append((place, cell))
        if eta:
            cells.append((HELD_OUT_PLACE - 0.5, f"eta {eta:>6}"))
        return "  ".join(cell for _, cell in sorted(cells, key=lambda cell: cell[0]))

    def _everything(self, metrics: Metrics) -> None:
        for name, value in sorted(metrics.items()):
            text = "" if name in self._explained else meaning(name)
            self._explained.add(name)
            self.say(f"    {name:<36} {value:<12.6g} {text}".rstrip())


HELD_OUT_PLACE = rank(Number("", "eval/x", 0.0, ""))
"""Held-out scores come last in a line, because most steps have none."""


class Screen(Plain):
    """A live screen: progress bar with ETA, the handful of numbers with their course, time per stage, a sample now and then."""

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
        self.numbers: dict[str, Number] = {}
        self.course: dict[str, deque[float]] = {}
        self.stages: dict[str, float] = {}
        self.sample: RenderableType | None = None
        self._sample_due = 0.0
        self.live = Live(self.panel(), console=console, refresh_per_second=4, transient=True)
        self.live.start()

    @override
    def begin(self, step: int, before: Metrics) -> None:
        self.bar.reset(self.task, completed=step, stage="start")
        self._show(before)

    @override
    def stage(self, name: str) -> None:
        self.bar.update(self.task, stage=name)

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        self.bar.update(self.task, completed=step)
        self._show(metrics)

    @override
    def sampled(self, step: int, samples: Sequence[Sample]) -> None:
        if samples and time.monotonic() >= self._sample_due:
            self._sample_due = time.monotonic() + SAMPLE_EVERY
            self.sample = sample_panel(step, samples[step % len(samples)])

    @override
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None:
        self.close()
        super().finish(run, summary)

    @override
    def close(self) -> None:
        self.live.stop()

    def _show(self, metrics: Metrics) -> None:
        for number in numbers(metrics):
            self.numbers[number.label] = number
            self.course.setdefault(number.label, deque(maxlen=COURSE)).append(number.value)
        self.stages = {n.removeprefix("time/"): v for n, v in metrics.items() if n in STAGES} or self.stages
        self.live.update(self.panel())

    def panel(self) -> Group:
        """What is on the screen now."""
        table = Table.grid(padding=(0, 2))
        for number in sorted(self.numbers.values(), key=rank)[:ROWS]:
            value = Text(number.text, style="bold", justify="right")
            table.add_row(visible(number.label), value, Text(sparkline(self.course[number.label]), style="cyan"))
        parts: list[RenderableType] = [self.bar, table]
        if self.stages:
            spent = sum(self.stages.values()) or 1.0
            shares = (f"{name} {seconds:.3g} s ({seconds / spent:.0%})" for name, seconds in self.stages.items())
            parts.append(Text("stages  " + "  ".join(shares), style="dim"))
        return Group(*parts, *([self.sample] if self.sample is not None else []))


STAGES = tuple(f"time/{name}" for name in ("rollout", "infer", "train", "publish", "eval", "checkpoint", "data"))
SAMPLE_EVERY = 20.0
"""Seconds between two samples on the screen."""
COURSE, ROWS = 40, 16
"""Values of a sparkline, and numbers on the screen."""
BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Draw numbers as blocks between their smallest and their largest."""
    known = [value for value in values if value == value and abs(value) != float("inf")]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if value in known else " " for value in values)


def sample_panel(step: int, sample: Sample) -> Panel:
    """A sample for the screen: the end of its prompt, its completion, gold answer and reward."""
    content = sample.prompt.content
    prompt = content if isinstance(content, str) else str(content[-1].get("content", "")) if content else ""
    gold = sample.prompt.columns.get(GOLD)
    reward = str(sample.failure) if sample.reward is None else f"{sample.reward:.4g}"
    grid = Table.grid(padding=(0, 2))
    for name, text in {"prompt": prompt, "wrote": sample.completion, "gold": gold, "reward": reward}.items():
        if text is not None:
            grid.add_row(Text(name, style="dim"), shortened(" ".join(str(text).split()), 320))
    return Panel(grid, title=visible(f"step {step}, sample {sample.id}, {sample.prompt.domain}"), title_align="left")


def ending(run: RunReader, summary: Mapping[str, Any]) -> tuple[Table | None, list[str]]:
    """Return the table of scores before and after, if any were measured, and the closing lines; the first is the title."""
    kinds = {"score": "", **{kind: f"_{kind}" for kind in ("sampled", "success", "effective", "turns", *MEASURED)}}
    shown = {label: suffix for label, suffix in kinds.items() if summary.get(f"before{suffix}")}
    names = list(dict.fromkeys(name for suffix in shown.values() for name in summary[f"before{suffix}"]))
    lower = {label for label in MEASURED if lower_is_better(label)}
    table = Table("held out", *(f"{label} ↓" if label in lower else label for label in shown))
    for name in names:
        cells = ([summary.get(f"{when}{suffix}", {}).get(name) for when in ("before", "after")] for suffix in shown.values())
        table.add_row(Text(name), *("–" if None in pair else "{:.3f} → {:.3f}".format(*pair) for pair in cells))
    lines = [f"{summary['name']}: {summary['steps']} steps in {summary['seconds']:.0f} s"]
    lines += [] if names else ["held out none: eval.sets in the recipe names sets to measure before and after"]
    lines += [f"run      {run.path}", f"model    {run.model_path}: {model_text(run)}", f"report   {run.path / 'report.html'}"]
    lines += [f"look     drumroll run samples {run.path}"] if run.rollouts() else []
    return table if names else None, lines


def for_console(config: RunConfig, console: Console, *, verbose: bool = False) -> Progress:
    """Return a live screen for a terminal, lines for anything else and with `verbose`."""
    return Screen(config, console) if console.is_terminal and not verbose else Plain(config, console, verbose=verbose)
