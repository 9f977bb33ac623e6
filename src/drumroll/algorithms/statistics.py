"""Sums, means and ratios over groups, sequences and masks; all shapes flat, nothing padded."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_LIMIT = 20.0
"""Log-ratios are cut here: beyond it a ratio says only "far away", and its exponential would overflow."""


def log_ratio(above: Tensor, below: Tensor, limit: float = LOG_LIMIT) -> Tensor:
    """log(above / below), cut to ±limit; two impossible tokens (-inf both) are equally likely."""
    gap = above - below
    return torch.where(gap.isnan(), torch.zeros_like(gap), gap).clamp(-limit, limit)


def sums_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size] the sum of the values of each index."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def totals_of(values: Tensor, index: Tensor, size: int | None = None) -> Tensor:
    """[like values] the sum of each value's own group; there are at most `size` groups."""
    return sums_by(values, index, int(index.max()) + 1 if size is None else size)[index]


def means_of(values: Tensor, index: Tensor, size: int | None = None) -> Tensor:
    """[like values] the mean of each value's own group; there are at most `size` groups."""
    size = int(index.max()) + 1 if size is None else size
    return (sums_by(values, index, size) / sums_by(torch.ones_like(values), index, size).clamp_min(1))[index]


def deviations_of(values: Tensor, index: Tensor) -> Tensor:
    """[like values] the standard deviation (population) of each value's own group."""
    return means_of((values - means_of(values, index)) ** 2, index).sqrt()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the masked entries; 0 elsewhere, and everywhere when they are all equal."""
    if not mask.any():
        return torch.zeros_like(values)
    chosen = values[mask]
    deviation = chosen.std(correction=0)
    scaled = (values - chosen.mean()) / deviation if deviation > 1e-8 else torch.zeros_like(values)
    return scaled * mask
