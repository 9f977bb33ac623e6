"""Choosing the next token of many rows at once, with random numbers keyed by sample and position.

One uniform number per token is hashed from (seed, position) and looked up in the row's cumulative distribution:
the draw of a sample does not depend on its neighbours, and nothing is drawn per vocabulary entry.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def keyed_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1) from (seed, position): two rounds of the splitmix64 finaliser over a Weyl sequence."""
    with np.errstate(over="ignore"):
        z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_p: Tensor | None = None, top_k: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [rows] and their log-probs [rows] from logits [rows, vocabulary].

    A temperature of 0 is greedy, with the log-prob of the undisturbed distribution. `top_p` and `top_k` restrict
    what may be drawn (evaluation only); the log-prob stays that of the unrestricted distribution.
    """
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(logits.float() / scale, dim=-1)
    probs = logprobs.exp()
    if top_p is not None and top_k is not None:
        probs = _restrict(probs, top_p, top_k)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform.to(torch.float64)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _restrict(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero all but the k likeliest entries (k = 0: all) and the smallest set whose mass reaches p."""
    ranked, order = probs.sort(dim=-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (before < top_p[:, None]) & ((top_k[:, None] == 0) | (rank < top_k[:, None]))
    return torch.zeros_like(probs).scatter(1, order, ranked * keep)
