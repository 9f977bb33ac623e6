"""Per-token diagnostics of an update: collected by each rank, merged over ranks, then summarised as metrics.

Metrics are computed from sums and whole columns, never from averages of ranks, so that they are the same on any mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drumroll.models.experts import Routed

Metrics = dict[str, float]

QUANTILES = {"q01": 0.01, "q99": 0.99}
SPREAD = frozenset({"ratio", "behaviour_ratio"})
"""Columns whose quantiles and maximum are metrics too."""


@dataclass
class Statistics:
    """What one rank saw in an update. `columns` have a value for each trained token, or for each unit."""

    area: str = "train"  # of the metrics' names
    loss: float = 0.0
    tokens: int = 0
    steps: list[tuple[float, float]] = field(default_factory=list)  # gradient norm and learning rate of each optimizer step
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    visits: dict[int, Tensor] = field(default_factory=dict)  # by layer: [experts] how many trained tokens visited each
    ahead: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)  # losses and columns still on the device

    def add(self, loss: Tensor, tokens: int, columns: dict[str, Tensor], routed: Routed | None = None) -> None:
        """Count a micro-batch: its part of the loss, its trained tokens, their diagnostics, and the experts that they visited."""
        self.tokens += tokens
        if routed is not None:
            columns = {**columns, "router_entropy": routed.entropy}
            self._visit(routed.visits)
        self.ahead.append((loss.detach(), {name: column.detach().float() for name, column in columns.items()}))

    def settle(self) -> None:
        """Bring to the host what is still on the device: it waits three times, however much there is."""
        found, self.ahead = self.ahead, []
        self.visits = dict(zip(self.visits, _to_host(list(self.visits.values())), strict=True))
        if not found:
            return
        for loss in torch.stack([loss for loss, _ in found]).cpu().tolist():
            self.loss += loss
        named = [(name, column) for _, columns in found for name, column in columns.items()]
        for (name, _), column in zip(named, _to_host([column for _, column in named]), strict=True):
            self.columns.setdefault(name, []).append(column)

    def _visit(self, visits: dict[int, Tensor]) -> None:
        for layer, counts in visits.items():
            self.visits[layer] = self.visits[layer] + counts if layer in self.visits else counts

    def extend(self, other: Statistics) -> None:
        """Count all that another has counted, but for the optimizer's steps."""
        other.settle()
        self.tokens += other.tokens
        self.loss += other.loss
        for name, parts in other.columns.items():
            self.columns.setdefault(name, []).extend(parts)
        self._visit(other.visits)

    def metrics(self) -> Metrics:
        """`<area>/<name>`: means over trained tokens, of some also quantiles and maximum."""
        self.settle()
        steps = max(1, len(self.steps))
        found: Metrics = {"loss": self.loss / steps, "tokens": self.tokens}
        found["grad_norm"] = sum(norm for norm, _ in self.steps) / steps
        found["lr"] = self.steps[-1][1] if self.steps else 0.0
        for name, parts in self.columns.items():
            column = torch.cat(parts)
            if not len(column):  # no good, or no bad, answer among those rated
                continue
            found[name] = float(column.max() if name == "mismatch" else column.mean())
            if name in SPREAD:
                found[f"{name}_max"] = float(column.max())
                ordered = column.sort().values
                for label, q in QUANTILES.items():
                    found[f"{name}_{label}"] = float(ordered[round(q * (len(ordered) - 1))])
            if name == "correction":  # effective sample size of the corrected tokens, as a share
                found["effective_samples"] = float(column.sum() ** 2 / (len(column) * (column**2).sum()).clamp_min(1e-12))
        found |= _loads(self.visits)
        return {f"{self.area}/{name}": float(value) for name, value in found.items()}


def _loads(visits: dict[int, Tensor]) -> Metrics:
    """How many more tokens than on average visit the busiest expert, of each layer and of all, and the share of experts without any."""
    if not visits:
        return {}
    layers = {f"expert_load/layer{layer}": float(counts.max() / counts.float().mean()) for layer, counts in visits.items()}
    idle = float((torch.cat(list(visits.values())) == 0).float().mean())
    return {"expert_load/max": max(layers.values()), **layers, "experts_idle": idle}


def _to_host(columns: list[Tensor]) -> list[Tensor]:
    """The columns in host memory, by one copy; each in memory of its own, because they travel between processes."""
    if all(column.device.type == "cpu" for column in columns):
        return columns
    return [part.clone() for part in torch.cat(columns).cpu().split([len(column) for column in columns])]


def merge(parts: Sequence[Statistics]) -> Metrics:
    """The metrics of an update, given what one rank of each share saw. All ranks take the optimizer's steps together."""
    whole = Statistics(parts[0].area, steps=parts[0].steps)
    for part in parts:
        whole.extend(part)
    return whole.metrics() if whole.steps else {}
