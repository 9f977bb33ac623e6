"""Turn-level returns (multi-turn credit, as the process supervision of DeepSeekMath, 2402.03300)."""

import torch
from torch import Tensor

from drumroll.algorithms.advantages.parts import EPSILON, ESTIMATORS, Scores
from drumroll.algorithms.statistics import deviations_of, means_of


@ESTIMATORS.register("turns", grouped=True, per_token=True, turns=True)
def turns(scores: Scores) -> Tensor:
    """The discounted return from each turn on, less the mean of all turns of the group, over their deviation."""
    assert scores.turns is not None
    group_of = scores.group_of[scores.turns.sample_of]
    returns = scores.turns.returns(scores.config.turn_discount)
    deviation = deviations_of(returns, group_of)
    centred = returns - means_of(returns, group_of)
    return torch.where(deviation > EPSILON, centred / (deviation + EPSILON), 0.0)[scores.turns.of_token]
