"""The report's picture of a reward model's calibration: how often it was right against how sure it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumroll.runfiles.calibration import Calibration, read_calibration
from drumroll.runfiles.reader import RunReader

LEFT, RIGHT, TOP, BOTTOM = 34.0, 252.0, 10.0, 150.0
LARGEST, SMALLEST = 7.0, 2.2
"""Radii of points."""


@dataclass(frozen=True)
class Point:
    """A bin with pairs: its numbers, and its place in the picture."""

    span: str
    pairs: int
    predicted: float
    observed: float
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Reliability:
    """The picture of one held-out set."""

    name: str
    error: float
    points: list[Point]


def reliability(run: RunReader) -> list[Reliability]:
    """The pictures of a run's held-out sets; none if it trained no reward model."""
    return [Reliability(name, each.error, list(_points(each))) for name, each in read_calibration(run.path).items()]


def x_of(predicted: float) -> float:
    """The place of a probability of 0.5 to 1."""
    return round(LEFT + (predicted - 0.5) * 2 * (RIGHT - LEFT), 1)


def y_of(observed: float) -> float:
    """The place of a share."""
    return round(BOTTOM - observed * (BOTTOM - TOP), 1)


def _points(found: Calibration) -> Iterator[Point]:
    bins, most = len(found.pairs), max(found.pairs, default=0)
    for i, (pairs, predicted, observed) in enumerate(zip(found.pairs, found.predicted, found.observed, strict=True)):
        if pairs:
            span = f"{0.5 + i / bins / 2:.2f} to {0.5 + (i + 1) / bins / 2:.2f}"
            radius = round(SMALLEST + (LARGEST - SMALLEST) * (pairs / most) ** 0.5, 1)
            yield Point(span, pairs, predicted, observed, x_of(predicted), y_of(observed), radius)
