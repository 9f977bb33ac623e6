"""Advantage estimators: from the rewards of samples to one advantage per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drumroll.config.algorithm import AlgorithmConfig
from drumroll.registry import Registry

Estimator = Callable[[Tensor, Tensor, AlgorithmConfig], Tensor]
"""(rewards [samples], group of each sample [samples], config) → advantages [samples]."""

ESTIMATORS: Registry[Estimator] = Registry("algorithm.advantage")
EPSILON = 1e-6


def group_means(values: Tensor, group_of: Tensor) -> Tensor:
    """[samples] the mean of each sample's group."""
    groups = int(group_of.max()) + 1
    sums = torch.zeros(groups, dtype=values.dtype).index_add_(0, group_of, values)
    counts = torch.zeros(groups, dtype=values.dtype).index_add_(0, group_of, torch.ones_like(values))
    return (sums / counts)[group_of]


@ESTIMATORS.register("grpo")
def grpo(rewards: Tensor, group_of: Tensor, config: AlgorithmConfig) -> Tensor:
    """Reward minus the group's mean, by default over the group's standard deviation (DeepSeekMath, 2402.03300)."""
    rewards = rewards.to(torch.float64)
    centred = rewards - group_means(rewards, group_of)
    if not config.normalise_std:
        return centred.float()
    std = group_means(centred**2, group_of).sqrt()
    return torch.where(std > EPSILON, centred / (std + EPSILON), 0.0).float()
