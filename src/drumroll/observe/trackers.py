"""Sends metrics and samples to TensorBoard, Weights & Biases and trackio, which write their own files.

A tracker that is not installed is refused with its install command. An exception of a tracker becomes one sentence, and the
run goes on without it, unless the config says `required`. A resumed run continues the tracker's run, whose id is in
`trackers.json`.
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drumroll.config import dump
from drumroll.config.run import TrackerConfig
from drumroll.errors import DrumrollError, MissingExtra, TrackerError
from drumroll.runfiles.durable import write_text
from drumroll.runfiles.format import TRACKERS
from drumroll.sample import Sample
from drumroll.store.run import Run

COLUMNS = ("id", "domain", "prompt", "completion", "reward", "stop")
"""The columns of a table of samples."""


class Tracker(Protocol):
    """An opened tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics."""
        ...

    def table(self, step: int, name: str, rows: list[list[Any]]) -> None:
        """Send rows with `COLUMNS`."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class Trackers:
    """All trackers of a run; calls `notice` with a sentence for each that fails."""

    def __init__(self, run: Run, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._opened: list[tuple[TrackerConfig, Tracker]] = []
        for config in run.config.trackers:
            try:
                self._opened.append((config, OPEN[config.kind](run, config)))
            except DrumrollError:
                raise
            except Exception as error:
                if config.required:
                    raise TrackerError(
                        f"the tracker {config.kind} could not be opened: {_first_line(error)}. "
                        "Set required: false to train without it, or remove it from trackers."
                    ) from error
                notice(f"the tracker {config.kind} could not be opened: {_first_line(error)}. The run goes on without it.")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics to every tracker; drop a tracker that fails."""
        self._each(step, lambda config, tracker: tracker.log(step, metrics))

    def show(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        """Send a table of some samples, spread over all, to every tracker that wants one."""

        def send(config: TrackerConfig, tracker: Tracker) -> None:
            if config.samples and samples:
                shown = samples[:: max(1, len(samples) // config.samples)][: config.samples]
                tracker.table(step, f"samples/{name}", [_row(sample) for sample in shown])

        self._each(step, send)

    def close(self) -> None:
        """Flush and close every tracker; a second call does nothing."""
        while self._opened:
            config, tracker = self._opened.pop()
            try:
                tracker.close()
            except Exception as error:
                self._notice(f"the tracker {config.kind} could not be closed: {_first_line(error)}.")

    def _each(self, step: int, send: Callable[[TrackerConfig, Tracker], None]) -> None:
        for opened in list(self._opened):
            try:
                send(*opened)
            except Exception as error:
                self._opened.remove(opened)
                kind = opened[0].kind
                self._notice(f"the tracker {kind} failed at step {step}: {_first_line(error)}. The run goes on without it.")


def _row(sample: Sample) -> list[Any]:
    content = sample.prompt.content
    prompt = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    stop = None if sample.stop is None else sample.stop.value
    return [sample.id, sample.prompt.domain, prompt, sample.completion, sample.reward, stop]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def check_installed(trackers: Sequence[TrackerConfig]) -> None:
    """Refuse trackers whose packages are missing."""
    for tracker in trackers:
        _need(tracker.kind)


@dataclass(frozen=True)
class Identity:
    """The id of a tracker's run, and the last step that an earlier session logged under it (-1: none)."""

    id: str
    logged: int


def identity(run: Run, config: TrackerConfig) -> Identity:
    """Return the id kept in the run directory, or a new one, which is written there."""
    path, key = run.path / TRACKERS, f"{config.kind}:{config.project}"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if key in known:
        return Identity(known[key], max((int(line["step"]) for line in run.metrics), default=-1))
    known[key] = secrets.token_hex(4)
    write_text(path, json.dumps(known) + "\n")
    return Identity(known[key], -1)


class _TensorBoard:
    """Event files in the run directory. Steps that a resume does again hide those of before."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        _need("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._run = run
        self._open: Callable[..., Any] = SummaryWriter
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._at(step).add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: list[list[Any]]) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        self._at(step).add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _at(self, step: int) -> Any:
        if self._writer is None:
            self._writer = self._open(str(self._run.path / "tensorboard"), purge_step=step)
            self._writer.add_text("config", "```yaml\n" + dump(self._run.config) + "```", step)
        return self._writer


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


class _WandB:
    """A run of Weights & Biases. Its history cannot be rewritten: steps that a resume does again keep their first values."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        self._wandb: Any = _need("wandb")
        self._own = identity(run, config)
        self._live = self._wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags or None,
            name=config.name or run.config.name,
            id=self._own.id,
            resume="allow" if config.mode == "online" else None,
            mode=config.mode,
            dir=str(run.path),
            config=run.config.model_dump(mode="json"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._own.logged:
            self._live.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: list[list[Any]]) -> None:
        if step > self._own.logged:
            self._live.log({name: self._wandb.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self) -> None:
        self._live.finish()


class _Trackio:
    """A run of trackio, in its own local store or the Space that TRACKIO_SPACE_ID names. It finds a run by its name."""

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        self._trackio: Any = _need("trackio")
        self._own = identity(run, config)
        settings = run.config.model_dump(mode="json") | {"tags": config.tags}
        self._live = self._trackio.init(
            project=config.project,
            name=f"{config.name or run.config.name}-{self._own.id}",
            group=config.group,
            config=settings,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._own.logged:
            self._live.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: list[list[Any]]) -> None:
        if step > self._own.logged:
            self._live.log({name: self._trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self) -> None:
        self._live.finish()


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(f"the {NAMES[module]} tracker", module) from None


NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "trackio": "trackio"}
OPEN: dict[str, Callable[[Run, TrackerConfig], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}
