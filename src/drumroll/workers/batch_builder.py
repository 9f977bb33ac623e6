"""Where batches are put together. On a cluster it is a process of its own, so that the controller never holds tensors.

It remembers nothing between calls: what an algorithm's parts remember travels with the call as plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drumroll.algorithms import Algorithm
from drumroll.algorithms.losses import AnyLoss, Loss
from drumroll.batch import Batch, join, pack
from drumroll.learners import Aggregation, Statistics, Update
from drumroll.learners.heads import LogProbHead
from drumroll.learners.statistics import merge
from drumroll.sample import Group, Version

Memory = dict[str, Any]


class BatchBuilder:
    """Turns groups into batches, and batches into work."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def needs(self) -> dict[str, str]:
        """The passes and samples that the algorithm asks for, each with the reason."""
        return self.algorithm.needs

    def start(self) -> Memory:
        """What the algorithm's parts remember before the first step."""
        return self.algorithm.state()

    def pack(self, groups: Sequence[Group], oldest: Version) -> Batch:
        """Groups as packed tensors."""
        return pack(groups, oldest=oldest)

    def join(self, batch: Batch, column: str, *parts: Tensor) -> Batch:
        """The batch with a column that data-parallel ranks have computed."""
        return batch.with_(**{column: batch.gather(parts)})

    def advantages(self, batch: Batch, memory: Mapping[str, Any]) -> Batch:
        """Rewards become advantages; `report` tells what was seen on the way."""
        self.algorithm.restore(memory)
        return self.algorithm.advantages(batch)

    def report(self) -> tuple[dict[str, float], Memory]:
        """Metrics of the last batch, and what the parts remember after it."""
        return self.algorithm.metrics, self.algorithm.state()

    def actor_work(self, batch: Batch, temperature: float, idle: bool, demonstrations: Batch | None = None) -> Update:
        """The policy's update, with demonstrations beside its own samples if there are some."""
        batch = batch if demonstrations is None else join(batch, demonstrations)
        return Update(batch, self.algorithm.loss, self.algorithm.aggregate, temperature, idle)

    def work(self, batch: Batch, loss: AnyLoss, aggregate: Aggregation, temperature: float = 1.0) -> Update:
        """An update by a loss of a pipeline's own."""
        return Update(batch, loss, aggregate, temperature)

    def measure(self, batch: Batch, loss: Loss, aggregate: Aggregation) -> dict[str, float]:
        """The loss and its diagnostics on a batch whose log-probs are known, without an update."""
        assert batch.old is not None
        now = batch.old[batch.mask]
        per_token, columns = LogProbHead().loss(loss, (now, torch.zeros_like(now)), batch, moved=False)
        found = {name: float(column.mean()) for name, column in columns.items() if len(column)}
        return {"loss": float((per_token * aggregate(batch)[batch.mask]).sum()), **found}

    def numbers(self, batch: Batch, *parts: Tensor) -> list[float]:
        """The numbers of all trained tokens, in order, that data-parallel ranks have computed."""
        return batch.gather(parts)[batch.mask].tolist()

    def divergence(self, batch: Batch) -> float:
        """The mean over samples of the log-probability under the policy over that under the reference."""
        assert batch.old is not None
        assert batch.reference is not None
        return float((batch.old - batch.reference)[batch.mask].double().sum()) / batch.num_samples

    def metrics(self, *parts: Statistics) -> dict[str, float]:
        """The metrics of an update, from what one rank of each share saw."""
        return merge(parts)

    def critic_work(self, batch: Batch) -> Update:
        """The critic's update."""
        return Update(batch, self.algorithm.value_loss, self.algorithm.value_aggregate)
