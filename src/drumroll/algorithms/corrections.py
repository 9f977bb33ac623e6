"""Weights for tokens that another policy sampled: older weights, or an engine whose numbers differ.

The ratio compared is old / behaviour: the policy before this update over the one that sampled. The loss's own ratio,
now / old, stays what it is (decoupled PPO, 2505.24298). No gradient flows through these weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumroll.algorithms.statistics import LOG_LIMIT, log_ratio, means_of, totals_of
from drumroll.config.algorithm import AlgorithmConfig


def behaviour_weights(
    old: Tensor, behaviour: Tensor, sequence: Tensor, config: AlgorithmConfig, sequences: int | None = None
) -> Tensor:
    """[tokens] how much each token counts; `sequences`, if known, saves counting them."""
    gap = log_ratio(old, behaviour).detach()
    low, high = config.correction_low, config.correction_high
    match config.correction:
        case "truncate":
            return torch.exp(gap).clamp_max(high)
        case "truncate_sequence":
            total = totals_of(gap, sequence, sequences)
            return torch.exp(total.clamp(-LOG_LIMIT, LOG_LIMIT)).clamp_max(high)
        case "band":
            ratio = torch.exp(gap)
            return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        case "geometric":
            mean = torch.exp(means_of(gap, sequence, sequences))
            return ((mean >= low) & (mean <= high)).to(gap.dtype)
        case _:
            return torch.ones_like(gap)
