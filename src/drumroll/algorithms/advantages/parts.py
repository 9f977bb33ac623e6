"""What an estimator sees, and the registry of estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.config.algorithm import AlgorithmConfig
from drumroll.registry import Registry

EPSILON = 1e-6


@dataclass(frozen=True)
class TurnScores:
    """The turns of the samples, in order."""

    sample_of: Tensor  # [turns]
    rewards: Tensor  # [turns]
    anchor_of: Tensor  # [turns] equal where a group's members began a turn in the same state; -1 where none is known
    of_token: Tensor  # [trained tokens]

    def returns(self, discount: float) -> Tensor:
        """[turns] the rewards from each turn on, later ones discounted."""
        return discounted(self.rewards, self.sample_of, discount)


@dataclass(frozen=True)
class Scores:
    """Per sample: shaped reward, group, number of policy tokens. Per trained token: reward, value, and whose it is."""

    rewards: Tensor  # [samples] less the token penalties
    group_of: Tensor  # [samples]
    lengths: Tensor  # [samples] tokens that the policy wrote, trained or not
    config: AlgorithmConfig
    greedy: Tensor | None = None  # [samples] reward of the group's greedy sample; with needs=("greedy",)
    token_rewards: Tensor | None = (
        None  # [trained tokens] penalties; each turn's reward at its last token, else the outcome at a trace's
    )
    values: Tensor | None = None  # [trained tokens] the critic's; with needs=("values",)
    trace_of: Tensor | None = None  # [trained tokens]
    passed: Tensor | None = None  # [samples] whether the reward was above 0, before anything was taken from it
    turns: TurnScores | None = None  # with the trait `turns`
    chain_of: Tensor | None = (
        None  # [trained tokens] equal for tokens of one episode, or of one trace where no episode was played
    )

    def chains(self) -> Tensor:
        """[trained tokens] equal for tokens that later rewards are credited to: of one episode, else of one trace."""
        chains = self.trace_of if self.chain_of is None else self.chain_of
        assert chains is not None
        return chains

    def successes(self) -> Tensor:
        """[samples] whether a sample passed."""
        return self.rewards > 0 if self.passed is None else self.passed


Estimator = Callable[[Scores], Tensor]
ESTIMATORS: Registry[Estimator] = Registry("algorithm.advantage")
"""Traits: `grouped` (compares the samples of a group), `per_token` (returns [trained tokens]), `turns`, `needs`."""


def discounted(values: Tensor, trace_of: Tensor, decay: float) -> Tensor:
    """[like values] each value's sum over itself and the later ones of its trace (or chain), decayed by distance."""
    if not len(values):
        return values.clone()
    starts = torch.cat([trace_of.new_tensor([0]), (trace_of[1:] != trace_of[:-1]).nonzero()[:, 0] + 1])
    lengths = torch.diff(starts, append=trace_of.new_tensor([len(values)]))
    row = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    column = torch.arange(len(values)) - starts[row]
    table = values.new_zeros(len(starts), int(lengths.max()))
    table[row, column] = values
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += decay * table[:, t + 1]
    return table[row, column]
