"""Whether a reward model's probabilities hold: how often it is right where it says that it is right with probability p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Pairs by the probability that the model gives to the answer it prefers, in equal bins from 0.5 to 1."""

    pairs: list[int]
    predicted: list[float]  # the mean probability; 0 in an empty bin
    observed: list[float]  # how often the preferred answer was the chosen one

    @classmethod
    def of(cls, margins: Tensor, bins: int = BINS) -> Calibration:
        """From [pairs] scores of chosen less scores of rejected answers. A tie is half right."""
        sure = torch.sigmoid(margins.double().abs())
        right = (margins > 0).double() + 0.5 * (margins == 0)
        where = ((sure - 0.5) * 2 * bins).long().clamp(max=bins - 1)
        count = torch.bincount(where, minlength=bins)
        means = [torch.bincount(where, values, minlength=bins) / count.clamp_min(1) for values in (sure, right)]
        return cls(count.tolist(), *(mean.tolist() for mean in means))

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over pairs of |predicted - observed| of their bins."""
        gaps = (n * abs(p - o) for n, p, o in zip(self.pairs, self.predicted, self.observed, strict=True))
        return sum(gaps) / max(1, sum(self.pairs))
