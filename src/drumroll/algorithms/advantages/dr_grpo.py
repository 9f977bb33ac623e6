"""Dr.GRPO (2503.20783)."""

from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores
from drumroll.algorithms.statistics import means_of


@ESTIMATORS.register("dr_grpo", grouped=True)
def dr_grpo(scores: Scores) -> Tensor:
    """Reward minus the group's mean, not scaled: scaling favours groups that are nearly solved (2503.20783)."""
    return scores.rewards - means_of(scores.rewards, scores.group_of)
