"""TOPR (2503.14286)."""

import torch
from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("topr")
def topr(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Full weight on good sequences, ratio truncated to [0, 1] on bad ones (2503.14286)."""
    truncated = tokens.sequence_ratio(mean=False).detach().clamp(0, 1)
    weight = torch.where(tokens.advantages >= 0, 1.0, truncated)
    return -weight * tokens.advantages * tokens.logprobs
