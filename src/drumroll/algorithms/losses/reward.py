"""The loss of a reward model: the chosen answer of a pair scores higher than the rejected one (Bradley-Terry)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from drumroll.algorithms.statistics import sums_by


@dataclass(frozen=True)
class Scores:
    """What the loss sees of a micro-batch of pairs, all [answers]."""

    scores: Tensor  # with gradient
    chosen: Tensor  # bool
    unit: Tensor  # which pair an answer belongs to
    units: int  # how many pairs
    margins: Tensor | None = None  # of the answer's pair

    def of(self, values: Tensor, chosen: Tensor) -> Tensor:
        """[pairs] a column of the chosen, or of the rejected, answers."""
        return sums_by(torch.where(chosen, values, 0.0), self.unit, self.units)


@dataclass(frozen=True)
class RewardLoss:
    """-log σ(chosen - rejected - margin) + center · (chosen + rejected)²; plain data, so that it can travel to a worker.

    Both answers get their pair's loss: weighted by `unit_mean`, they sum to the mean over pairs.
    """

    center: float = 0.0
    name: str = "reward_model"
    skips_zero_advantage: bool = False

    def __call__(self, tokens: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = (tokens.of(tokens.scores, which) for which in (tokens.chosen, ~tokens.chosen))
        margin = 0.0 if tokens.margins is None else tokens.of(tokens.margins, tokens.chosen)
        terms = -logsigmoid(chosen - rejected - margin) + self.center * (chosen + rejected) ** 2
        found, other = chosen.detach(), rejected.detach()
        stats = {
            "accuracy": (found > other).to(found.dtype),
            "margin": found - other,
            "score_chosen": found,
            "score_rejected": other,
        }
        return terms[tokens.unit], stats
