"""Losses per token. The learner multiplies them by the tokens' weights and sums, whatever they are.

A loss is one decorated function of `Tokens` and the config; a user's own is named as `module:function`. Gradients flow
through `tokens.logprobs` (and `tokens.entropy`) only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drumroll.algorithms.corrections import behaviour_weights
from drumroll.algorithms.statistics import means_of, sums_by
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.registry import Registry

LOG_LIMIT = 20.0


@dataclass
class Tokens:
    """What a loss sees of the trained tokens of a micro-batch, all [trained tokens]."""

    logprobs: Tensor  # with gradient
    entropy: Tensor  # with gradient only when the loss asks for it
    old: Tensor  # before the update
    behaviour: Tensor  # when sampled
    advantages: Tensor
    reference: Tensor | None
    sequence: Tensor  # which sequence of the micro-batch a token belongs to

    def ratio(self) -> Tensor:
        """Probability now over probability before the update."""
        return torch.exp((self.logprobs - self.old).clamp(-LOG_LIMIT, LOG_LIMIT))

    def sequence_ratio(self, *, mean: bool) -> Tensor:
        """[trained tokens] the ratio of each token's whole sequence: geometric mean over its tokens, or product."""
        gap = self.logprobs - self.old
        total = (
            means_of(gap, self.sequence) if mean else sums_by(gap, self.sequence, int(self.sequence.max()) + 1)[self.sequence]
        )
        return torch.exp(total.clamp(-LOG_LIMIT, LOG_LIMIT))


class Loss(Protocol):
    """What the learner is given: per-token loss and per-token diagnostics."""

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
ACTS_WITHOUT_ADVANTAGE = frozenset({"mirror"})
"""Losses with a gradient on tokens whose advantage is 0."""


def _clipped(ratio: Tensor, config: AlgorithmConfig) -> Tensor:
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


@LOSSES.register("ppo")
def ppo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Clipped ratio (1707.06347), asymmetric if asked (clip-higher, 2503.14476), dual clip (1912.09729)."""
    ratio, advantages = tokens.ratio(), tokens.advantages
    gain = torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages)
    if config.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, config.dual_clip * advantages), gain)
    return -gain


@LOSSES.register("pg")
def pg(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Plain policy gradient."""
    return -tokens.advantages * tokens.logprobs


@LOSSES.register("gspo")
def gspo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """PPO on the sequence's length-normalised ratio (2507.18071); aggregate by sequence_mean."""
    ratio = tokens.sequence_ratio(mean=True)
    return -torch.minimum(ratio * tokens.advantages, _clipped(ratio, config) * tokens.advantages)


@LOSSES.register("cispo")
def cispo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Policy gradient weighted by the clipped ratio, so that no token loses its gradient (MiniMax-M1, 2506.13585)."""
    return -_clipped(tokens.ratio().detach(), config) * tokens.advantages * tokens.logprobs


@LOSSES.register("topr")
def topr(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Full weight on good sequences, ratio truncated to [0, 1] on bad ones (2503.14286)."""
    truncated = tokens.sequence_ratio(mean=False).detach().clamp(0, 1)
    weight = torch.where(tokens.advantages >= 0, 1.0, truncated)
    return -weight * tokens.advantages * tokens.logprobs


@LOSSES.register("sapo")
def sapo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """A smooth gate instead of a clip, sharper for negative advantages (2511.20347)."""
    heat = torch.where(tokens.advantages > 0, config.temperature_positive, config.temperature_negative)
    gate = torch.sigmoid(heat * (tokens.ratio() - 1)) * 4 / heat
    return -gate * tokens.advantages


@LOSSES.register("mirror")
def mirror(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Policy gradient with a squared log-ratio that holds the policy near the one before (Kimi k1.5, 2501.12599)."""
    gap = (tokens.logprobs - tokens.old).clamp(-LOG_LIMIT, LOG_LIMIT)
    return -tokens.advantages * tokens.logprobs + 0.5 * config.mirror * gap**2


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference): k1 = log ratio, k2 = half its square, k3 = unbiased and positive."""
    gap = (reference - logprobs).clamp(-LOG_LIMIT, LOG_LIMIT)
    if estimator == "k1":
        return -gap
    return 0.5 * gap**2 if estimator == "k2" else torch.exp(gap) - gap - 1


@dataclass(frozen=True)
class PolicyLoss:
    """A policy term with its correction, KL term and entropy bonus; plain data, so that it can travel to a worker."""

    config: AlgorithmConfig

    @property
    def entropy_gradient(self) -> bool:
        """Entropy is differentiated only when it is rewarded."""
        return self.config.entropy != 0

    @property
    def skips_zero_advantage(self) -> bool:
        """True without other terms: KL and entropy act on every token."""
        return not (self.config.kl or self.config.entropy or self.config.loss in ACTS_WITHOUT_ADVANTAGE)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        ratio = tokens.ratio().detach()
        stats = {"ratio": ratio, "clipped": (_clipped(ratio, config) != ratio).float()}
        loss = LOSSES.get(config.loss)(tokens, config)
        if config.correction != "none":
            weights = behaviour_weights(tokens.old, tokens.behaviour, tokens.sequence, config)
            loss = loss * weights
            stats["correction"] = weights
        if config.kl and tokens.reference is not None:
            kl = kl_divergence(tokens.logprobs, tokens.reference, config.kl_estimator)
            loss = loss + config.kl * kl
            stats["kl_reference"] = kl.detach()
        if config.entropy:
            loss = loss - config.entropy * tokens.entropy
        return loss, stats


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the given answer."""

    entropy_gradient: bool = False
    skips_zero_advantage: bool = False

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -tokens.logprobs, {}
