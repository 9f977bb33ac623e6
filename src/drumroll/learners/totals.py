"""Per-token diagnostics of an update, gathered over its micro-batches and made into metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drumroll.learners import Metrics

QUANTILES = {"q01": 0.01, "q99": 0.99}
SPREAD = frozenset({"ratio", "behaviour_ratio"})
"""Shown with quantiles and a maximum beside their mean."""


def merge(reports: Sequence[Metrics]) -> Metrics:
    """The metrics of a data-parallel update from those of its ranks: losses add up, means are weighted by tokens.

    Learning rate and gradient norm are of the optimizer's steps, which all ranks take together.
    """
    if len(reports) == 1:
        return reports[0]
    merged: Metrics = {}
    for name in dict.fromkeys(n for report in reports for n in report):
        area, _, last = name.partition("/")
        found = [(r[name], r.get(f"{area}/tokens", 0.0)) for r in reports if name in r]
        if last in ("loss", "tokens"):
            merged[name] = sum(value for value, _ in found)
        elif last == "mismatch" or last.endswith("_max"):
            merged[name] = max(value for value, _ in found)
        elif last in ("lr", "grad_norm"):
            merged[name] = found[0][0]
        else:
            merged[name] = sum(v * n for v, n in found) / max(1.0, sum(n for _, n in found))
    return merged


class Totals:
    """Means over trained tokens; of some also the extremes."""

    def __init__(self, area: str) -> None:
        self.area = area
        self.steps: list[tuple[float, float]] = []  # gradient norm and learning rate of each optimizer step
        self.tokens = 0
        self.loss = 0.0
        self.columns: dict[str, list[Tensor]] = {}

    def add(self, loss: Tensor, tokens: int, stats: dict[str, Tensor]) -> None:
        """Count a micro-batch: its share of the loss, and per-token diagnostics."""
        self.tokens += tokens
        self.loss += float(loss)
        for name, column in stats.items():
            self.columns.setdefault(name, []).append(column.detach().float().cpu())

    def metrics(self) -> Metrics:
        """`<area>/<name>`, all plain numbers."""
        steps = max(1, len(self.steps))
        found: Metrics = {"loss": self.loss / steps, "tokens": self.tokens}
        found["grad_norm"] = sum(norm for norm, _ in self.steps) / steps
        found["lr"] = self.steps[-1][1] if self.steps else 0.0
        for name, parts in self.columns.items():
            column = torch.cat(parts)
            found[name] = float(column.max() if name == "mismatch" else column.mean())
            if name in SPREAD:
                found[f"{name}_max"] = float(column.max())
                ordered = column.sort().values
                for label, q in QUANTILES.items():
                    found[f"{name}_{label}"] = float(ordered[round(q * (len(ordered) - 1))])
            if name == "correction":  # effective sample size of the corrected tokens, as a share
                found["effective_samples"] = float(column.sum() ** 2 / (len(column) * (column**2).sum()).clamp_min(1e-12))
        return {f"{self.area}/{name}": float(value) for name, value in found.items()}
