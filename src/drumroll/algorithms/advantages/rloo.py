"""RLOO (2402.14740)."""

import torch
from torch import Tensor

from drumroll.algorithms.advantages.dr_grpo import dr_grpo
from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores
from drumroll.algorithms.statistics import sums_by


@ESTIMATORS.register("rloo", grouped=True)
def rloo(scores: Scores) -> Tensor:
    """Reward minus the mean of the group's other samples (2402.14740); 0 in a group of one."""
    size = int(scores.group_of.max()) + 1
    count = sums_by(torch.ones_like(scores.rewards), scores.group_of, size)[scores.group_of]
    return torch.where(count > 1, dr_grpo(scores) * count / (count - 1).clamp_min(1), 0.0)
