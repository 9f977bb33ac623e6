"""The learner contract: what trains. One file per backend beside this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from drumroll.algorithms.losses import Loss, ValueLoss
from drumroll.batch import Batch

Metrics = dict[str, float]
Aggregation = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Update:
    """One call's work: the batch, the loss on its tokens, and the share of each token."""

    batch: Batch
    loss: Loss | ValueLoss
    aggregate: Aggregation
    temperature: float = 1.0
    idle: bool = False  # count the update without training: the critic comes first


class Learner(Protocol):
    """Owns the policy's weights and optimizer."""

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[tokens] log-prob of every trained token, 0 elsewhere; of the rank's share only (`Batch.gather` joins them)."""
        ...

    def reference_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """The same of the weights before training: a frozen role's own, or a LoRA model's without its adapters."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """[tokens] the expected return before every trained token, 0 elsewhere; a critic's only."""
        ...

    def update(self, work: Update) -> Metrics:
        """Minibatches, epochs, optimizer steps."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The working weights that are trained, by name; not copies."""
        ...

    def interrupt(self) -> None:
        """End a running update before its next micro-batch; callable from any thread."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs."""
        ...

    def load(self, folder: Path) -> None:
        """Return to a saved state."""
        ...

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model directory."""
        ...

    def offload(self) -> None:
        """Leave the device to others: everything moves to the host's memory. On a CPU nothing moves."""
        ...

    def reload(self) -> None:
        """Take the device again."""
        ...
