"""CISPO (MiniMax-M1, 2506.13585)."""

from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens, clipped
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("cispo")
def cispo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Policy gradient weighted by the clipped ratio, so that no token loses its gradient (MiniMax-M1, 2506.13585)."""
    return -clipped(tokens.ratio().detach(), config) * tokens.advantages * tokens.logprobs
