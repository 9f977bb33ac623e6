"""Metrics to TensorBoard and Weights & Biases. A tracker that is not installed is named with its install command."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from drumroll.config.run import TrackerConfig
from drumroll.errors import MissingExtra
from drumroll.store.run import Run

Log = Callable[[int, Mapping[str, float]], None]


class Trackers:
    """All trackers of a run."""

    def __init__(self, run: Run) -> None:
        opened = [OPEN[tracker.kind](run, tracker) for tracker in run.config.trackers]
        self._logs: list[Log] = [log for log, _ in opened]
        self._closers = [close for _, close in opened]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step's metrics everywhere."""
        for log in self._logs:
            log(step, metrics)

    def close(self) -> None:
        """Flush and end; safe to call twice."""
        while self._closers:
            self._closers.pop()()


def _tensorboard(run: Run, config: TrackerConfig) -> tuple[Log, Callable[[], None]]:
    _need("tensorboard", "the TensorBoard tracker")
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run.path / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(run: Run, config: TrackerConfig) -> tuple[Log, Callable[[], None]]:
    wandb: Any = _need("wandb", "the Weights & Biases tracker")
    live = wandb.init(
        project=config.project,
        name=run.config.name,
        mode=config.mode,
        dir=str(run.path),
        config=run.config.model_dump(mode="json"),
    )
    return lambda step, metrics: live.log(dict(metrics), step=step), live.finish


def _need(module: str, feature: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(feature, module) from None


OPEN: dict[str, Callable[[Run, TrackerConfig], tuple[Log, Callable[[], None]]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
