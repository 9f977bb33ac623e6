"""Calls a user's functions as steps and evaluations end. An exception in one ends the run, after the step is committed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumroll.errors import ConfigError
from drumroll.runfiles.frames import SampleRow
from drumroll.runfiles.rollouts import sample_row
from drumroll.sample import Sample

OnMetrics = Callable[[int, dict[str, float]], object]
"""Receives a step and its metrics."""
OnSample = Callable[[SampleRow], object]
"""Receives a recorded sample."""


@dataclass
class Callbacks:
    """The functions of a run, and the first exception that one of them raised; none is called after it."""

    on_step: OnMetrics | None = None
    on_eval: OnMetrics | None = None
    on_sample: OnSample | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_eval", "on_sample"):
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise ConfigError(f"{name} is a coroutine function; a callback is a plain function (def, not async def).")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_step`."""
        self._call("on_step", self.on_step, step, dict(metrics))

    def eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_eval`."""
        self._call("on_eval", self.on_eval, step, dict(metrics))

    def samples(self, step: int, kind: str, samples: Sequence[Sample]) -> None:
        """Call `on_sample` for each sample."""
        for sample in samples if self.on_sample is not None else ():
            self._call("on_sample", self.on_sample, sample_row(step, kind, sample))

    def check(self) -> None:
        """Raise the exception that a callback raised, with its traceback."""
        if self.error is not None:
            raise self.error

    def _call(self, name: str, function: Callable[..., object] | None, *args: Any) -> None:
        if function is None or self.error is not None:
            return
        try:
            function(*args)
        except Exception as error:
            error.add_note(f"{name} raised this; the run ended with the step that it was called for, which is saved.")
            self.error = error
