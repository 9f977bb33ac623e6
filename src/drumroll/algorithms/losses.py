"""Losses per token. The learner multiplies them by the tokens' weights and sums, whatever they are.

A loss is plain data plus `__call__`, so that it can travel to the worker that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drumroll.batch import Batch


@dataclass
class Tokens:
    """What a loss sees of the trained tokens of a micro-batch, all [trained tokens]."""

    logprobs: Tensor  # with gradient
    entropy: Tensor  # without, unless the loss asks for it
    old: Tensor  # before the update
    behaviour: Tensor  # when sampled
    advantages: Tensor
    reference: Tensor | None


class Loss(Protocol):
    """Per-token loss and per-token diagnostics."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy."""
        ...

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether a token without advantage adds nothing to the gradient."""
        ...

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class PPOLoss:
    """Clipped policy gradient (PPO, 1707.06347) with an optional KL term (k3) and entropy bonus."""

    clip_low: float
    clip_high: float
    kl: float = 0.0
    entropy: float = 0.0

    @property
    def entropy_gradient(self) -> bool:
        """Entropy is differentiated only when it is rewarded."""
        return self.entropy != 0

    @property
    def skips_zero_advantage(self) -> bool:
        """True without other terms: KL and entropy act on every token."""
        return not self.kl and not self.entropy

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = torch.exp((tokens.logprobs - tokens.old).clamp(-20, 20))
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
        stats = {"ratio": ratio.detach(), "clipped": (clipped != ratio).float()}
        if self.kl and tokens.reference is not None:
            gap = (tokens.reference - tokens.logprobs).clamp(-20, 20)
            kl = torch.exp(gap) - gap - 1
            loss = loss + self.kl * kl
            stats["kl_reference"] = kl.detach()
        if self.entropy:
            loss = loss - self.entropy * tokens.entropy
        return loss, stats


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the given answer."""

    entropy_gradient: bool = False
    skips_zero_advantage: bool = False

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -tokens.logprobs, {}


def token_mean(batch: Batch) -> Tensor:
    """Every trained token counts the same."""
    return batch.mask.float() / batch.mask.sum().clamp_min(1)


def sequence_mean(batch: Batch) -> Tensor:
    """Every sample counts the same, and so does every token within it."""
    lengths = batch.policy_lengths()
    trained = (lengths > 0).sum().clamp_min(1)
    return batch.mask.float() / lengths.clamp_min(1)[batch.sample_of_token()] / trained


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean}
