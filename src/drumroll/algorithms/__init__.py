"""An algorithm is a choice of parts: estimator × loss × aggregation, each a function on tensors without I/O."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.algorithms.losses import AGGREGATIONS, PPOLoss
from drumroll.batch import Batch
from drumroll.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class Needs:
    """The passes an algorithm asks for besides the update itself."""

    old_logprobs: bool
    reference: bool


class Algorithm:
    """The parts that a config names, ready to use."""

    def __init__(self, config: AlgorithmConfig, *, single_update: bool) -> None:
        self.config = config
        self.estimate = ESTIMATORS.get(config.advantage)
        self.aggregate = AGGREGATIONS[config.aggregation]
        self.loss = PPOLoss(config.clip_low, config.clip_high, config.kl, config.entropy)
        # With one optimizer step per batch the policy before the update is the policy in it: nothing to recompute.
        self.needs = Needs(old_logprobs=not single_update, reference=config.kl > 0)

    def advantages(self, batch: Batch) -> Batch:
        """Give every trained token its sample's advantage."""
        per_sample = self.estimate(batch.rewards, batch.group_of, self.config)
        assert per_sample.shape == batch.rewards.shape, f"{self.config.advantage} must return one advantage per sample"
        assert torch.isfinite(per_sample).all(), f"{self.config.advantage} returned a non-finite advantage"
        return batch.with_(advantages=per_sample[batch.sample_of_token()] * batch.mask)
