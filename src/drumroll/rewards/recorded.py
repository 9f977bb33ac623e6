"""Calls a reward function that logs, in the process where it runs, and returns its result with what it logged.

`drumroll.rewards.recorded:module:function` is an import path like any other, so a worker process imports the user's module
before the deadline of the first call starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drumroll.registry import import_path
from drumroll.rewards.signatures import BadReward, Outcome


@dataclass
class Log:
    """What a reward logged in one call: a value per sample, and numbers for all of them."""

    count: int
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a value with each sample."""
        if len(values) != self.count:
            raise ValueError(f"log_extra('{column}') needs one value per completion, {self.count}; it got {len(values)}")
        self.extra[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; several of the same name are averaged."""
        if not math.isfinite(value):
            raise ValueError(f"log_metric('{name}') needs a finite number; it got {value}")
        self.metrics.setdefault(name, []).append(float(value))

    def added_to(self, index: int, outcome: Outcome | BadReward) -> Outcome | BadReward:
        """Return a sample's outcome with what was logged."""
        if isinstance(outcome, BadReward) or not (self.extra or self.metrics):
            return outcome
        means = {name: sum(values) / len(values) for name, values in self.metrics.items()}
        kept = {column: values[index] for column, values in self.extra.items()}
        return Outcome(outcome.value, {**outcome.parts, **means}, {**outcome.extra, **kept})


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], count: int, logs: Collection[str]) -> tuple[Any, Log]:
    log = Log(count)
    return function(**arguments, **{name: getattr(log, name) for name in logs}), log


def __getattr__(name: str) -> Callable[..., Any]:
    """`module:function` as a function that returns the result and the log."""
    if ":" not in name:
        raise AttributeError(name)
    return partial(_call, import_path(name, "reward"))
