"""The critic's loss (PPO's clipped value loss, 1707.06347)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.algorithms.losses.parts import ValueTokens
from drumroll.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the value; with a clip, the worse of the value and one held near the old value."""

    config: AlgorithmConfig
    name: str = "value"

    def __call__(self, tokens: ValueTokens) -> tuple[Tensor, dict[str, Tensor]]:
        loss = 0.5 * (tokens.values - tokens.returns) ** 2
        clip = self.config.value_clip
        moved = torch.zeros_like(loss)
        if clip is not None:
            held = tokens.old + (tokens.values - tokens.old).clamp(-clip, clip)
            loss = torch.maximum(loss, 0.5 * (held - tokens.returns) ** 2)
            moved = ((tokens.values - tokens.old).abs() > clip).to(loss.dtype)
        return loss, {"value": tokens.values.detach(), "clipped": moved}
