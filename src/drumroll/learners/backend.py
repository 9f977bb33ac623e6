"""The contract of a training backend: it holds a role's weights on a mesh and drives micro-batches through them.

The update loop (`learner.py`) decides what is trained; a backend decides how. It owns working weights, master weights,
gradients, optimizer and their placement, and knows no algorithm: the loss is a function that it calls on what its head
computed. One file per backend in `backends/`, which registers itself here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from drumroll.batch import Batch
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig, ParallelConfig
from drumroll.learners.checkpoint import Snapshot
from drumroll.learners.heads import Head, Settings
from drumroll.learners.ranks import Ranks
from drumroll.learners.statistics import Statistics
from drumroll.models.loading import LoadedModel
from drumroll.registry import Registry

Numbers = tuple[Tensor, ...]
"""What a head computes for a micro-batch, [trained tokens] each: log-prob and entropy, or value."""
LossFunction = Callable[[Numbers, Batch], tuple[Tensor, dict[str, Tensor]]]
"""The loss of a micro-batch, summed, and per-token diagnostics."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many micro-batches a backend takes in one call: at least so many, and a multiple of so many.

    The loop adds empty micro-batches, so that ranks also have equally many; they carry no weight.
    """

    least: int = 0
    multiple: int = 1

    def fit(self, number: int) -> int:
        """The smallest permitted count that holds so many."""
        return -(-max(number, self.least) // self.multiple) * self.multiple


class Backend(Protocol):
    """Weights, gradients and optimizer of a role. Ranks call every method together, with the same number of micro-batches."""

    ranks: Ranks
    stop: threading.Event
    """Set by the loop: `train` and `infer` raise `Interrupted` before their next micro-batch."""
    count: Count

    @property
    def model(self) -> LoadedModel | None:
        """The working model, where engines of the same process can generate with it; else None."""
        ...

    @property
    def working(self) -> Sequence[Tensor]:
        """The trained weights as this rank holds them."""
        ...

    def train(self, micro_batches: Sequence[Batch], settings: Settings, loss: LossFunction) -> Statistics:
        """Accumulate the gradient of the summed loss over all ranks' micro-batches; every rank gets its share's statistics."""
        ...

    def infer(self, micro_batches: Sequence[Batch], settings: Settings) -> list[Numbers]:
        """The head's numbers for each micro-batch, without gradient."""
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Within the block the weights are those before training; only with LoRA or frozen weights."""
        ...

    def clip(self, limit: float) -> float:
        """Scale the gradient to at most this norm; returns its norm before."""
        ...

    def step(self, rate: float) -> None:
        """Take an optimizer step at a learning rate, and drop the gradient."""
        ...

    def drop_gradients(self) -> None:
        """Forget the gradient that `train` accumulated."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, whole, one at a time, under their Hugging Face names.

        A call to all ranks: each must take them all, at the same time. A tensor is valid until the next one is taken.
        """
        ...

    def snapshot(self) -> Snapshot:
        """Copy master weights and optimizer state to host memory; written, they are what `load` reads on any mesh."""
        ...

    def load(self, folder: Path) -> None:
        """Return to a saved state. Each rank reads only what it holds."""
        ...

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model directory."""
        ...

    def offload(self) -> None:
        """Move everything to host memory, so that another role can use the device. On a CPU nothing moves."""
        ...

    def reload(self) -> None:
        """Take the device again."""
        ...


@dataclass(frozen=True)
class LearnerSpec:
    """What a backend is opened with. Without `optim` the role is frozen: it has no optimizer and only infers."""

    name: str  # of the model
    head: Head
    ranks: Ranks
    optim: OptimConfig | None = None
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    recompute_activations: bool = False
    lora: LoraConfig | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # the sizes are those of `ranks.mesh`; the rest says how


BACKENDS: Registry[Callable[[LearnerSpec], Backend]] = Registry("roles.actor.backend")
"""Functions that open a backend. `config/learners.py` says what each supports; one of your own registers with the traits that it
lacks, for example `adapters=False`. A plain function named as `module:function` has all of them."""
