"""PPO (1707.06347), clip-higher (DAPO, 2503.14476), dual clip (1912.09729)."""

import torch
from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens, clipped
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("ppo")
def ppo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Clipped ratio (1707.06347), asymmetric if asked (clip-higher, 2503.14476), dual clip (1912.09729)."""
    ratio, advantages = tokens.ratio(), tokens.advantages
    gain = torch.minimum(ratio * advantages, clipped(ratio, config) * advantages)
    if config.dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, config.dual_clip * advantages), gain)
    return -gain
