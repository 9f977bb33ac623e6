"""Which metric of an evaluation decides the best checkpoint, and whether lower is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drumroll.errors import ConfigError

LOWER = {"loss", "perplexity", "kl", "divergence", "error", "length", "turns", "malformed", "cut"}
"""Words in the last part of a metric's name that make lower values the better ones."""

MEASURED = ("loss", "perplexity", "accuracy")
"""Metrics of held-out sets with answers, in the order of tables."""


def lower_is_better(metric: str) -> bool:
    """Whether a lower value of a metric is better, by its name."""
    area, _, rest = metric.partition("/")
    name = "" if area == "eval" and "/" not in rest else metric.rpartition("/")[2]  # `eval/<set>` is a score
    return not LOWER.isdisjoint(name.split("_"))


@dataclass(frozen=True)
class BestBy:
    """The metrics whose mean decides, and the direction."""

    metrics: tuple[str, ...]
    lower: bool = False

    @property
    def name(self) -> str | None:
        """The metric, if it is one and not the score of a set."""
        return self.metrics[0] if len(self.metrics) == 1 and self.metrics[0].count("/") > 1 else None

    def score(self, measured: Mapping[str, float]) -> float | None:
        """The number by which checkpoints are compared; None if nothing is measured."""
        if not self.metrics:
            return None
        if missing := [metric for metric in self.metrics if metric not in measured]:
            known = ", ".join(sorted(name for name in measured if name.startswith("eval/"))) or "nothing"
            raise ConfigError(f"eval.best_by asks for {missing[0]}, but an evaluation of this run measures {known}.")
        return sum(measured[metric] for metric in self.metrics) / len(self.metrics)

    def improves(self, score: float | None, best: Mapping[str, object] | None) -> bool:
        """Whether a score is better than that of the best checkpoint so far, if this was compared by the same metric."""
        if score is None or score != score:
            return False
        before = None if best is None or best.get("by") != self.name else best["score"]
        return not isinstance(before, int | float) or (score < before if self.lower else score > before)
