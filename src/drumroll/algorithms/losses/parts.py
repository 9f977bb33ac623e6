"""What a loss sees, and the registry of losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drumroll.algorithms.statistics import LOG_LIMIT, log_ratio, means_of, totals_of
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.registry import Registry


@dataclass
class Tokens:
    """What a policy loss sees of the trained tokens of a micro-batch, all [trained tokens]."""

    logprobs: Tensor  # with gradient
    entropy: Tensor  # with gradient only when the loss asks for it
    old: Tensor  # before the update
    behaviour: Tensor  # when sampled
    advantages: Tensor
    reference: Tensor | None
    sequence: Tensor  # which sequence of the micro-batch a token belongs to
    rewards: Tensor | None = None  # of the token's sample
    teacher: Tensor | None = None
    divergence: Tensor | None = None  # from the teacher, with gradient, where more than the sampled token is compared
    teacher_weight: Tensor | None = None  # of the token's domain
    given: Tensor | None = None  # bool: of a demonstration, beside the policy's own samples
    sequences: int | None = None  # at most so many; the host knows it, and else would wait for the device to count them
    unit: Tensor | None = None  # which unit (pair) of the micro-batch a token belongs to; None if the batch has no units
    units: int | None = None  # how many

    def ratio(self) -> Tensor:
        """Probability now over probability before the update."""
        return torch.exp(log_ratio(self.logprobs, self.old))

    def sequence_ratio(self, *, mean: bool) -> Tensor:
        """[trained tokens] the ratio of each token's whole sequence: geometric mean over its tokens, or product."""
        gap = log_ratio(self.logprobs, self.old, limit=1e4)  # the sequence's is cut below
        total = (means_of if mean else totals_of)(gap, self.sequence, self.sequences)
        return torch.exp(total.clamp(-LOG_LIMIT, LOG_LIMIT))


@dataclass
class ValueTokens:
    """What a value loss sees, all [trained tokens]."""

    values: Tensor  # with gradient
    old: Tensor  # before the update
    returns: Tensor


class Loss(Protocol):
    """What the learner is given: per-token loss and per-token diagnostics."""

    @property
    def name(self) -> str:
        """What an error message calls it."""
        ...

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy."""
        ...

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a token without advantage adds nothing to the gradient."""
        ...

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]: ...


PolicyTerm = Callable[[Tokens, AlgorithmConfig], Tensor]
LOSSES: Registry[PolicyTerm] = Registry("algorithm.loss")
"""Traits: `ratio=False` (takes the samples for the policy's own), `acts_without_advantage` (has a gradient at advantage 0)."""


def clipped(ratio: Tensor, config: AlgorithmConfig) -> Tensor:
    """The ratio within the config's range."""
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
