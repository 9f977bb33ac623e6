"""Generalised advantage estimation (1506.02438)."""

import torch
from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores, discounted


@ESTIMATORS.register("gae", per_token=True, needs=("values",))
def gae(scores: Scores) -> Tensor:
    """What each token gained beyond the critic's expectation, later gains decayed (GAE, 1506.02438)."""
    rewards, values, trace_of = scores.token_rewards, scores.values, scores.trace_of
    assert rewards is not None
    assert values is not None
    assert trace_of is not None
    discount, decay = scores.config.discount, scores.config.gae_decay
    last = torch.ones_like(trace_of, dtype=torch.bool)
    last[:-1] = trace_of[1:] != trace_of[:-1]
    following = torch.where(last, 0.0, values.roll(-1))
    return discounted(rewards + discount * following - values, trace_of, discount * decay)
