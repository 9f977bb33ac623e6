"""Advantage estimators: from the rewards of samples to one advantage per sample.

An estimator is one decorated function of `Scores`; a user's own is named as `module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.algorithms.statistics import deviations_of, means_of, sums_by
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.registry import Registry

EPSILON = 1e-6


@dataclass(frozen=True)
class Scores:
    """What an estimator sees, per sample: shaped reward, group, number of policy tokens."""

    rewards: Tensor
    group_of: Tensor
    lengths: Tensor
    config: AlgorithmConfig


Estimator = Callable[[Scores], Tensor]
ESTIMATORS: Registry[Estimator] = Registry("algorithm.advantage")


@ESTIMATORS.register("grpo")
def grpo(scores: Scores) -> Tensor:
    """Reward minus the group's mean, over the group's deviation (DeepSeekMath, 2402.03300)."""
    centred = dr_grpo(scores)
    deviation = deviations_of(scores.rewards, scores.group_of)
    return torch.where(deviation > EPSILON, centred / (deviation + EPSILON), 0.0)


@ESTIMATORS.register("dr_grpo")
def dr_grpo(scores: Scores) -> Tensor:
    """Reward minus the group's mean, not scaled: scaling favours groups that are nearly solved (2503.20783)."""
    return scores.rewards - means_of(scores.rewards, scores.group_of)


@ESTIMATORS.register("rloo")
def rloo(scores: Scores) -> Tensor:
    """Reward minus the mean of the group's other samples (2402.14740); 0 in a group of one."""
    size = int(scores.group_of.max()) + 1
    count = sums_by(torch.ones_like(scores.rewards), scores.group_of, size)[scores.group_of]
    return torch.where(count > 1, dr_grpo(scores) * count / (count - 1).clamp_min(1), 0.0)


@ESTIMATORS.register("opo")
def opo(scores: Scores) -> Tensor:
    """Reward minus the group's length-weighted mean, the baseline of least variance (2505.23585)."""
    size = int(scores.group_of.max()) + 1
    lengths = scores.lengths.to(scores.rewards.dtype)
    total = sums_by(lengths, scores.group_of, size)
    weighted = sums_by(lengths * scores.rewards, scores.group_of, size) / total.clamp_min(1)
    return scores.rewards - weighted[scores.group_of]


@ESTIMATORS.register("pass_at_k")
def pass_at_k(scores: Scores) -> Tensor:
    """What a sample adds to the chance that one of k drawn from its group passes (2508.10751); rewards above 0 pass."""
    result = torch.zeros_like(scores.rewards)
    for group in scores.group_of.unique().tolist():
        members = (scores.group_of == group).nonzero()[:, 0]
        passed = scores.rewards[members] > 0
        size, failed = len(members), int((~passed).sum())
        k = min(scores.config.pass_k, size)
        mean = 1 - math.comb(failed, k) / math.comb(size, k)
        deviation = math.sqrt(mean * (1 - mean))
        if deviation > EPSILON:
            others = math.comb(failed - 1, k - 1) / math.comb(size - 1, k - 1)
            good, bad = (1 - mean) / deviation, (1 - mean - others) / deviation
            result[members] = torch.where(passed, good, bad).to(result.dtype)
    return result


@ESTIMATORS.register("reinforce")
def reinforce(scores: Scores) -> Tensor:
    """The reward itself: undiscounted return of an outcome reward (Williams, 1992); whiten for a baseline."""
    return scores.rewards.clone()


@ESTIMATORS.register("positive")
def positive(scores: Scores) -> Tensor:
    """1 for samples with a reward above 0, else 0: learn from successes only (RAFT, 2304.06767; RAFT++, 2504.11343)."""
    return (scores.rewards > 0).to(scores.rewards.dtype)
