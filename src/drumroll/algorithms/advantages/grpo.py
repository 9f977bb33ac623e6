"""GRPO (DeepSeekMath, 2402.03300)."""

import torch
from torch import Tensor

from drumroll.algorithms.advantages.dr_grpo import dr_grpo
from drumroll.algorithms.advantages.parts import EPSILON, ESTIMATORS, Scores
from drumroll.algorithms.statistics import deviations_of


@ESTIMATORS.register("grpo", grouped=True)
def grpo(scores: Scores) -> Tensor:
    """Reward minus the group's mean, over the group's deviation (DeepSeekMath, 2402.03300)."""
    deviation = deviations_of(scores.rewards, scores.group_of)
    return torch.where(deviation > EPSILON, dr_grpo(scores) / (deviation + EPSILON), 0.0)
