"""Samples the next token of many rows at once, with random numbers keyed by sample and position.

One uniform number per token is hashed from (seed, position) and looked up in the row's cumulative distribution. So the
draw of a sample does not depend on its neighbours, and nothing is drawn per vocabulary entry. The vocabulary is summed
in blocks, and only the block that is hit is searched; the same sums give the log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.engines import Sampling
from drumroll.models.kernels import masses as masses_of
from drumroll.processes.accelerator import send

BLOCK = 256
RANKED = 1024


def keyed_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return uniforms in [0, 1) from (seed, position): two rounds of the splitmix64 finaliser over a Weyl sequence."""
    with np.errstate(over="ignore"):
        z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Restriction:
    """The entries that may be sampled, per row.

    They are the smallest set whose mass reaches `top_p`, of it the `top_k` likeliest (0: all), and of them those at
    least `min_p` times as likely as the likeliest. Entries as likely as the last one kept stay.
    """

    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, sampling: Sequence[Sampling], vocabulary: int) -> Restriction | None:
        """The restriction that requests ask for; None if every row may sample every entry."""
        if not any(s.top_p < 1 or s.top_k or s.min_p for s in sampling):
            return None
        columns = ([s.top_p for s in sampling], [min(s.top_k, vocabulary) for s in sampling], [s.min_p for s in sampling])
        return cls(*map(torch.tensor, columns))


def choose(
    logits: Tensor, temperature: Tensor, uniform: Tensor, restriction: Restriction | None = None
) -> tuple[Tensor, Tensor]:
    """Return tokens [rows] and their log-probs [rows] from logits [rows, vocabulary]; all else is given by the host.

    A temperature of 0 is greedy, with the log-prob at temperature 1. A restriction (evaluation only) limits which
    tokens may be sampled; the log-prob stays that of the unrestricted distribution. A row whose scaled logits are not
    all finite or -inf has no distribution: it gets some token, and a log-prob that is not finite.
    """
    greedy, device = temperature == 0, logits.device
    if restriction is None and (found := masses_of(logits, torch.where(greedy, 1.0, 1 / temperature), BLOCK)) is not None:
        return _from_masses(logits, torch.where(greedy, 1.0, 1 / temperature), greedy, uniform, *found)
    rows, vocabulary = logits.shape
    scaled = logits.float()
    if not bool(((temperature == 1) | greedy).all()):
        scaled = scaled / send(torch.where(greedy, 1.0, temperature), device)[:, None]
    peak = scaled.amax(dim=-1, keepdim=True)
    odds = scaled.new_zeros(rows, -(-vocabulary // BLOCK) * BLOCK)
    torch.sub(scaled, peak, out=odds[:, :vocabulary])
    odds[:, :vocabulary].exp_()
    blocks = odds.view(rows, -1, BLOCK)
    masses = blocks.sum(dim=-1)
    total = masses.sum(dim=-1, dtype=torch.float64)
    if restriction is not None:
        odds[:, :vocabulary] = _restrict(odds[:, :vocabulary], restriction)
        masses = blocks.sum(dim=-1)
    block, within = _lookup(masses, send(uniform.to(torch.float64), device))
    inside, _ = _lookup(blocks[torch.arange(rows, device=device), block], within)
    tokens = _greedy((block * BLOCK + inside).clamp_max_(vocabulary - 1), scaled, greedy)
    chosen = scaled.gather(1, tokens[:, None]) - peak
    return tokens, chosen[:, 0] - total.log().float()


def likeliest(logits: Tensor, temperature: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens of each row with their log-probs, those that `choose` would give them."""
    scale = send(torch.where(temperature == 0, 1.0, temperature), logits.device)
    found = (logits.float() / scale[:, None]).log_softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    return [list(zip(*row, strict=True)) for row in zip(found.indices.tolist(), found.values.tolist(), strict=True)]


def _from_masses(
    logits: Tensor, scale: Tensor, greedy: Tensor, uniform: Tensor, peak: Tensor, masses: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `choose`, given the sums of the blocks: only the block that is hit is computed again."""
    block, within = _lookup(masses, uniform.to(torch.float64))
    columns = block[:, None] * BLOCK + torch.arange(BLOCK)
    hit = logits.gather(1, columns.clamp_max(logits.shape[1] - 1)).float() * scale[:, None] - peak
    inside, _ = _lookup(hit.exp().masked_fill_(columns >= logits.shape[1], 0.0), within)
    tokens = _greedy((block * BLOCK + inside).clamp_max_(logits.shape[1] - 1), logits, greedy)
    chosen = logits.gather(1, tokens[:, None]).float() * scale[:, None] - peak
    return tokens, chosen[:, 0] - masses.sum(dim=-1, dtype=torch.float64).log().float()


def _greedy(tokens: Tensor, scores: Tensor, greedy: Tensor) -> Tensor:
    """Put the likeliest token into the rows that the host's mask marks."""
    if not bool(greedy.any()):
        return tokens
    rows = send(greedy.nonzero()[:, 0], tokens.device)
    return tokens.index_copy_(0, rows, scores.index_select(0, rows).argmax(dim=-1))


def _lookup(masses: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index at which a fraction of the summed masses falls, and the fraction within that index's mass."""
    cumulative = masses.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(cumulative, target, right=True).clamp_max_(masses.shape[1] - 1)  # out of range if not finite
    mass = masses.gather(1, index).to(torch.float64)
    below = cumulative.gather(1, index) - mass
    return index[:, 0], ((target - below) / mass).clamp(0.0, 1.0)[:, 0]


def _restrict(odds: Tensor, limit: Restriction) -> Tensor:
    """Set entries that may not be sampled to zero; `odds` are relative to the likeliest entry, which has 1.

    Rows with `top_p` alone may need more entries than are ranked at first; only then must the host look, and wait.
    """
    vocabulary = odds.shape[-1]
    count = min(vocabulary, max(RANKED, int(limit.top_k.max())))
    certain = bool(((limit.top_k > 0) | (limit.top_p >= 1)).all())
    limit = Restriction(*(send(each, odds.device) for each in (limit.top_p, limit.top_k, limit.min_p)))
    mass = limit.top_p.to(torch.float64)[:, None] * odds.sum(dim=-1, keepdim=True, dtype=torch.float64)
    unlimited = (limit.top_k == 0) & (limit.top_p >= 1)
    while True:
        ranked = odds.topk(count, dim=-1).values
        before = ranked.cumsum(-1, dtype=torch.float64) - ranked
        rank = torch.arange(count, device=odds.device)
        keep = (before < mass) & ((limit.top_k[:, None] == 0) | (rank < limit.top_k[:, None]))
        kept = keep.sum(dim=-1)
        if certain or count == vocabulary or bool((unlimited | (kept < count) | (limit.top_k == count)).all()):
            break
        count = vocabulary
    lowest = ranked.gather(1, (kept - 1).clamp_min(0)[:, None])
    lowest = torch.where(unlimited[:, None], 0.0, lowest)
    return torch.where(odds >= torch.maximum(lowest, limit.min_p[:, None]), odds, 0.0)
