"""Vanilla policy gradient (Williams, 1992)."""

from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("pg", ratio=False)
def pg(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Plain policy gradient."""
    return -tokens.advantages * tokens.logprobs
