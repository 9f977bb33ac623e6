"""SAPO (2511.20347)."""

import torch
from torch import Tensor

from drumroll.algorithms.losses.parts import LOSSES, Tokens
from drumroll.config.algorithm import AlgorithmConfig


@LOSSES.register("sapo")
def sapo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """A smooth gate instead of a clip, sharper for negative advantages (2511.20347)."""
    heat = torch.where(tokens.advantages > 0, config.temperature_positive, config.temperature_negative)
    gate = torch.sigmoid(heat * (tokens.ratio() - 1)) * 4 / heat
    return -gate * tokens.advantages
