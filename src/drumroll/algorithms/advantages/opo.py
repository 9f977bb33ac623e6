"""OPO (2505.23585)."""

from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores
from drumroll.algorithms.statistics import sums_by


@ESTIMATORS.register("opo", grouped=True)
def opo(scores: Scores) -> Tensor:
    """Reward minus the group's length-weighted mean, the baseline of least variance (2505.23585)."""
    size = int(scores.group_of.max()) + 1
    lengths = scores.lengths.to(scores.rewards.dtype)
    total = sums_by(lengths, scores.group_of, size)
    weighted = sums_by(lengths * scores.rewards, scores.group_of, size) / total.clamp_min(1)
    return scores.rewards - weighted[scores.group_of]
