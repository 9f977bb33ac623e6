"""Sends metrics to TensorBoard and Weights & Biases, which write their own folders in the run directory.

A tracker that is not installed is refused with its install command. An exception of a tracker becomes one sentence, and the
run goes on without it, unless the config says `required`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drumroll.config.run import TrackerConfig
from drumroll.errors import DrumrollError, MissingExtra, TrackerError
from drumroll.store.run import Run

Log = Callable[[int, Mapping[str, float]], None]


class Trackers:
    """All trackers of a run; calls `notice` with a sentence for each that fails."""

    def __init__(self, run: Run, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._opened: list[tuple[str, Log, Callable[[], None]]] = []
        for tracker in run.config.trackers:
            try:
                self._opened.append((tracker.kind, *OPEN[tracker.kind](run, tracker)))
            except DrumrollError:
                raise
            except Exception as error:
                if tracker.required:
                    raise TrackerError(
                        f"the tracker {tracker.kind} could not be opened: {_first_line(error)}. "
                        "Set required: false to train without it, or remove it from trackers."
                    ) from error
                notice(f"the tracker {tracker.kind} could not be opened: {_first_line(error)}. The run goes on without it.")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics to every tracker; drop a tracker that fails."""
        for opened in list(self._opened):
            kind, log, _ = opened
            try:
                log(step, metrics)
            except Exception as error:
                self._opened.remove(opened)
                self._notice(f"the tracker {kind} failed at step {step}: {_first_line(error)}. The run goes on without it.")

    def close(self) -> None:
        """Flush and close every tracker; a second call does nothing."""
        while self._opened:
            kind, _, close = self._opened.pop()
            try:
                close()
            except Exception as error:
                self._notice(f"the tracker {kind} could not be closed: {_first_line(error)}.")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def check_installed(trackers: Sequence[TrackerConfig]) -> None:
    """Refuse trackers whose packages are missing."""
    for tracker in trackers:
        _need(tracker.kind)


def _tensorboard(run: Run, config: TrackerConfig) -> tuple[Log, Callable[[], None]]:
    _need("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run.path / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(run: Run, config: TrackerConfig) -> tuple[Log, Callable[[], None]]:
    wandb: Any = _need("wandb")
    live = wandb.init(
        project=config.project,
        name=run.config.name,
        mode=config.mode,
        dir=str(run.path),
        config=run.config.model_dump(mode="json"),
    )
    return lambda step, metrics: live.log(dict(metrics), step=step), live.finish


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(f"the {NAMES[module]} tracker", module) from None


NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
OPEN: dict[str, Callable[[Run, TrackerConfig], tuple[Log, Callable[[], None]]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
