"""Pass@k training (2508.10751)."""

import math

import torch
from torch import Tensor

from drumroll.algorithms.advantages.parts import EPSILON, ESTIMATORS, Scores


@ESTIMATORS.register("pass_at_k", grouped=True)
def pass_at_k(scores: Scores) -> Tensor:
    """What a sample adds to the chance that one of k drawn from its group passes (2508.10751); rewards above 0 pass."""
    result = torch.zeros_like(scores.rewards)
    for group in scores.group_of.unique().tolist():
        members = (scores.group_of == group).nonzero()[:, 0]
        passed = scores.successes()[members]
        size, failed = len(members), int((~passed).sum())
        k = min(scores.config.pass_k, size)
        mean = 1 - math.comb(failed, k) / math.comb(size, k)
        deviation = math.sqrt(mean * (1 - mean))
        if deviation > EPSILON:
            others = math.comb(failed - 1, k - 1) / math.comb(size - 1, k - 1)
            good, bad = (1 - mean) / deviation, (1 - mean - others) / deviation
            result[members] = torch.where(passed, good, bad).to(result.dtype)
    return result
