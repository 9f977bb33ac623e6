"""Aggregations: the share of every token in the loss, decided before a minibatch is cut.

The learner sums share × loss, so the result cannot depend on how a batch is split, packed or ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.batch import Batch

Aggregation = Callable[[Batch, int], Tensor]
"""(minibatch, longest completion allowed) → share of each token."""


def token_mean(batch: Batch, longest: int = 1) -> Tensor:
    """Every trained token counts the same."""
    return batch.mask.float() / batch.mask.sum().clamp_min(1)


def _samples(batch: Batch) -> Tensor:
    """How many samples of the minibatch have a trained token."""
    return (batch.trained_lengths() > 0).sum().clamp_min(1)


def sequence_mean(batch: Batch, longest: int = 1) -> Tensor:
    """Every sample counts the same, and so does every token within it."""
    return batch.mask.float() / batch.trained_lengths().clamp_min(1)[batch.sample_of_token()] / _samples(batch)


def sequence_sum(batch: Batch, longest: int = 1) -> Tensor:
    """The sum over a sample's tokens, averaged over samples."""
    return batch.mask.float() / _samples(batch)


def unit_mean(batch: Batch, longest: int = 1) -> Tensor:
    """Every unit (a pair) counts the same, and so does every token within it."""
    unit, units = batch.unit_of_token()
    lengths = torch.zeros(units, dtype=torch.int64).index_add_(0, unit, batch.mask.to(torch.int64))
    return batch.mask.float() / lengths.clamp_min(1)[unit] / (lengths > 0).sum().clamp_min(1)


def fixed_length(batch: Batch, longest: int = 1) -> Tensor:
    """Sums over samples, divided by all samples × the longest completion allowed: no length is favoured (Dr.GRPO)."""
    return batch.mask.float() / max(1, len(batch.sample_of.unique())) / longest


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "fixed_length": fixed_length,
}


@dataclass(frozen=True)
class Shares:
    """The share of every token in the loss, by an aggregation's name and the samples' weights; plain data that can travel."""

    aggregation: str
    longest: int = 1

    def __call__(self, batch: Batch) -> Tensor:
        if batch.given is not None:
            return self._apart(batch, batch.given[batch.sample_of])
        shares = AGGREGATIONS[self.aggregation](batch, self.longest)
        return shares if batch.sample_weights is None else shares * batch.sample_weights[batch.sample_of_token()]

    def _apart(self, batch: Batch, given: Tensor) -> Tensor:
        """The policy's own samples share as if they were alone, and so do the tokens of demonstrations."""
        shares = torch.zeros(len(batch.tokens))
        for traces, share in (((~given).nonzero()[:, 0], self), (given.nonzero()[:, 0], token_mean)):
            part = batch.select(traces.tolist())
            shares[batch.places(traces.tolist())] = share(part.with_(given=None))
        return shares
