"""GiGPO (2505.10978)."""

import torch
from torch import Tensor

from drumroll.algorithms.advantages.grpo import grpo
from drumroll.algorithms.advantages.parts import EPSILON, ESTIMATORS, Scores
from drumroll.algorithms.statistics import deviations_of, means_of


@ESTIMATORS.register("gigpo", grouped=True, per_token=True, turns=True)
def gigpo(scores: Scores) -> Tensor:
    """The episode among its group, and each turn's return among turns that began in the same state (2505.10978)."""
    turns = scores.turns
    assert turns is not None
    anchored = turns.anchor_of >= 0
    anchor_of = torch.where(anchored, turns.anchor_of, turns.anchor_of.max() + 1)
    returns = turns.returns(scores.config.turn_discount)
    deviation = deviations_of(returns, anchor_of)
    step = (returns - means_of(returns, anchor_of)) / (deviation + EPSILON)
    step = torch.where(anchored & (deviation > EPSILON), step, 0.0)
    return (grpo(scores)[turns.sample_of] + scores.config.turn_weight * step)[turns.of_token]
