"""Whether a reward model's probabilities hold, and `calibration.json`: that of each held-out set at the last evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumroll.runfiles.durable import write_text
from drumroll.runfiles.format import CALIBRATION

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Pairs by the probability that the model gives to the answer it prefers, in equal bins from 0.5 to 1."""

    pairs: list[int]
    predicted: list[float]
    """The mean probability of each bin; 0 in an empty one."""
    observed: list[float]
    """How often the preferred answer was the chosen one."""

    @classmethod
    def of(cls, margins: Iterable[float], bins: int = BINS) -> Calibration:
        """From the score of the chosen less that of the rejected answer of each pair. A tie is half right."""
        found: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
        for margin in margins:
            sure, right = 1 / (1 + math.exp(-abs(margin))), 0.5 if margin == 0 else float(margin > 0)
            found[min(int((sure - 0.5) * 2 * bins), bins - 1)].append((sure, right))
        means = ([sum(pair[i] for pair in own) / max(1, len(own)) for own in found] for i in (0, 1))
        return cls([len(own) for own in found], *means)

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over pairs of |predicted - observed| of their bins."""
        gaps = (n * abs(p - o) for n, p, o in zip(self.pairs, self.predicted, self.observed, strict=True))
        return sum(gaps) / max(1, sum(self.pairs))


def write_calibration(run: Path, step: int, sets: Mapping[str, Calibration]) -> None:
    """Replace the file of a run directory."""
    text = json.dumps({"step": step, "sets": {name: asdict(each) for name, each in sets.items()}}, indent=1)
    write_text(run / CALIBRATION, text + "\n")


def read_calibration(run: Path) -> dict[str, Calibration]:
    """The sets by name; none if the run measured none."""
    try:
        found: dict[str, Any] = json.loads((run / CALIBRATION).read_text("utf-8"))["sets"]
        return {name: Calibration(**each) for name, each in found.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
