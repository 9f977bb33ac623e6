"""GSPO (2507.18071)."""

import torch
from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens, clipped
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("gspo")
def gspo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """PPO on the sequence's length-normalised ratio (2507.18071); aggregate by sequence_mean."""
    ratio = tokens.sequence_ratio(mean=True)
    return -torch.minimum(ratio * tokens.advantages, clipped(ratio, config) * tokens.advantages)
