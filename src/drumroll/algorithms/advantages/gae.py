"""Generalised advantage estimation (1506.02438)."""

import torch
from torch import Tensor

from drumroll.algorithms.advantages.parts import ESTIMATORS, Scores, discounted


@ESTIMATORS.register("gae", per_token=True, needs=("values",))
def gae(scores: Scores) -> Tensor:
    """What each token gained beyond the critic's expectation, later gains decayed (GAE, 1506.02438); over all turns of an episode."""
    rewards, values, chain_of = scores.token_rewards, scores.values, scores.chains()
    assert rewards is not None
    assert values is not None
    discount, decay = scores.config.discount, scores.config.gae_decay
    last = torch.ones_like(chain_of, dtype=torch.bool)
    last[:-1] = chain_of[1:] != chain_of[:-1]
    following = torch.where(last, 0.0, values.roll(-1))
    return discounted(rewards + discount * following - values, chain_of, discount * decay)
