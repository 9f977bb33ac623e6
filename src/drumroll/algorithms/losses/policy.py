"""A policy term with what may stand beside it: correction, KL term, entropy bonus, imitation of successes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.algorithms.corrections import behaviour_weights
from drumroll.algorithms.losses.distill import from_teacher
from drumroll.algorithms.losses.parts import LOSSES, Tokens, clipped
from drumroll.algorithms.statistics import log_ratio
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.divergence import DivergenceConfig


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference): k1 = log ratio, k2 = half its square, k3 = unbiased and positive."""
    gap = log_ratio(reference, logprobs)
    if estimator == "k1":
        return -gap
    return 0.5 * gap**2 if estimator == "k2" else torch.exp(gap) - gap - 1


@dataclass(frozen=True)
class PolicyLoss:
    """The whole loss of a policy's token; plain data, so that it can travel to a worker."""

    config: AlgorithmConfig

    @property
    def name(self) -> str:
        """The policy term's."""
        return self.config.loss

    @property
    def entropy_gradient(self) -> bool:
        """Entropy is differentiated only when it is rewarded."""
        return self.config.entropy != 0

    @property
    def divergence(self) -> DivergenceConfig | None:
        """How the policy is compared with a teacher."""
        return self.config.divergence if self.config.teacher else None

    @property
    def skips_zero_advantage(self) -> bool:
        """True without other terms: KL, entropy and imitation act on tokens without advantage too."""
        config = self.config
        acts = LOSSES.traits(config.loss).get("acts_without_advantage", False)
        return not (config.kl or config.teacher or config.entropy or config.sft or acts)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        ratio = tokens.ratio().detach()
        stats = {"ratio": ratio, "clipped": (clipped(ratio, config) != ratio).float()}
        loss = LOSSES.get(config.loss)(tokens, config)
        if config.correction != "none":
            weights = behaviour_weights(tokens.old, tokens.behaviour, tokens.sequence, config, tokens.sequences)
            loss = loss * weights
            stats["correction"] = weights
        if config.kl and tokens.reference is not None:
            kl = kl_divergence(tokens.logprobs, tokens.reference, config.kl_estimator)
            loss = loss + config.kl * kl
            stats["kl_reference"] = kl.detach()
        if config.teacher and (term := self._teacher(tokens, stats)) is not None:
            loss = loss + config.teacher * (term if tokens.teacher_weight is None else tokens.teacher_weight * term)
        if config.entropy:
            loss = loss - config.entropy * tokens.entropy
        if config.sft and tokens.given is not None:
            return self._beside(tokens, tokens.given, loss, stats)
        if config.sft and tokens.rewards is not None:
            loss = loss - config.sft * torch.where(tokens.rewards > 0, tokens.logprobs, 0.0)
        return loss, stats

    def _teacher(self, tokens: Tokens, stats: dict[str, Tensor]) -> Tensor | None:
        """The divergence from the teacher, and its metric."""
        config = self.config.divergence
        if tokens.teacher is not None and config.use == "reverse":
            stats["kl_teacher"] = kl_divergence(tokens.logprobs.detach(), tokens.teacher, "k1")
            return kl_divergence(tokens.logprobs, tokens.teacher, "k2")  # on the policy's own samples its gradient is the same
        term = from_teacher(tokens, config, own=True)
        if term is not None:
            stats["divergence"] = term.detach()
        return term

    def _beside(
        self, tokens: Tokens, given: Tensor, loss: Tensor, stats: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with demonstrations beside the policy's own samples, whose metrics stay their own."""
        stats = {name: column[~given] for name, column in stats.items()}
        stats["nll"] = -tokens.logprobs.detach()[given]
        return torch.where(given, -self.config.sft * tokens.logprobs, loss), stats
