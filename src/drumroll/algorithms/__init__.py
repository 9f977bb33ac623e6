"""An algorithm is a choice of parts: shaping × estimator × loss × aggregation × correction, functions on tensors, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.algorithms.advantages import ESTIMATORS, Scores
from drumroll.algorithms.aggregations import AGGREGATIONS
from drumroll.algorithms.losses import LOSSES, PolicyLoss
from drumroll.algorithms.statistics import whiten
from drumroll.batch import Batch
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.errors import AlgorithmError


@dataclass(frozen=True)
class Needs:
    """The passes an algorithm asks for besides the update itself."""

    old_logprobs: bool
    reference: bool


class Algorithm:
    """The parts that a config names, ready to use.

    With one optimizer step per batch the policy before the update is the policy in it, so its log-probs need no pass of
    their own. Samples of older weights are met by a correction, or by taking the sampling policy for the old one.
    """

    def __init__(self, config: AlgorithmConfig, *, single_update: bool, longest: int = 1, stale: bool = False) -> None:
        self.config = config
        self.longest = longest
        self.estimate = ESTIMATORS.get(config.advantage)
        self.loss = PolicyLoss(config)
        LOSSES.get(config.loss)
        self.old_is_behaviour = stale and config.correction == "none"
        self.needs = Needs(old_logprobs=not single_update and not self.old_is_behaviour, reference=config.kl > 0)

    def advantages(self, batch: Batch) -> Batch:
        """Give every trained token its sample's advantage, and every sample its weight."""
        config = self.config
        mask = batch.mask & ~batch.truncated[batch.sample_of_token()] if config.drop_truncated else batch.mask
        batch = batch.with_(mask=mask, old=batch.behaviour if self.old_is_behaviour else batch.old)
        lengths = batch.policy_lengths()
        shaped = self.shape(batch.rewards.to(torch.float64), lengths)
        per_sample = self.estimate(Scores(shaped, batch.group_of, lengths, config))
        _check(per_sample, shaped, config.advantage, batch)
        if config.scale == "batch":
            deviation = per_sample.std(correction=0)
            per_sample = per_sample / deviation if deviation > 1e-8 else torch.zeros_like(per_sample)
        tokens = per_sample[batch.sample_of_token()].float() * mask
        if config.whiten:
            tokens = whiten(tokens, mask)
        if config.advantage_clip is not None:
            tokens = tokens.clamp(-config.advantage_clip, config.advantage_clip)
        weights = torch.tensor([config.domain_weights.get(d, 1.0) for d in batch.domains])
        return batch.with_(advantages=tokens, sample_weights=weights)

    def shape(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Rewards as the estimator sees them: clipped, scaled, less a soft penalty for nearly running out of tokens."""
        config = self.config
        if config.reward_clip is not None:
            rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
        rewards = rewards * config.reward_scale
        if config.overlong_buffer:
            buffer = config.overlong_buffer * self.longest
            rewards = rewards - ((lengths - (self.longest - buffer)) / buffer).clamp(0, 1)
        return rewards

    def aggregate(self, batch: Batch) -> Tensor:
        """The share of every token in the loss."""
        shares = AGGREGATIONS[self.config.aggregation](batch, self.longest)
        return shares if batch.sample_weights is None else shares * batch.sample_weights[batch.sample_of_token()]


def _check(advantages: Tensor, rewards: Tensor, name: str, batch: Batch) -> None:
    """No NaN escapes: name the function and the sample."""
    if advantages.shape != rewards.shape:
        raise AlgorithmError(
            f"algorithm.advantage '{name}' must return one advantage per sample, got shape {tuple(advantages.shape)}."
        )
    bad = (~torch.isfinite(advantages)).nonzero()[:, 0].tolist()
    if bad:
        raise AlgorithmError(
            f"algorithm.advantage '{name}' gave {advantages[bad[0]].item()} for sample {bad[0]} of the batch "
            f"(group {int(batch.group_of[bad[0]])}, domain '{batch.domains[bad[0]]}', reward {rewards[bad[0]].item():g})."
        )
