"""The learner contract: what trains. One file per backend beside this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from drumroll.algorithms.losses import Loss
from drumroll.batch import Batch

Metrics = dict[str, float]
Aggregation = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Update:
    """One call's work: the batch, the loss on its tokens, and the share of each token."""

    batch: Batch
    loss: Loss
    aggregate: Aggregation
    temperature: float = 1.0


class Learner(Protocol):
    """Owns the policy's weights and optimizer."""

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """[tokens] log-prob of every trained token, 0 elsewhere."""
        ...

    def update(self, work: Update) -> Metrics:
        """Minibatches, epochs, optimizer steps."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The working weights by name; not copies."""
        ...

    def interrupt(self) -> None:
        """End a running update before its next micro-batch; callable from any thread."""
        ...

    def updates(self) -> int | None:
        """How many updates the weights have seen; None in the middle of one."""
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
