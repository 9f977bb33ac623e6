"""Attention over a tree of tokens: a prefix that several sequences share is computed once, and so is its gradient.

Tokens are laid end to end as nodes of a tree. A path is a sequence read from a root; its first `start` nodes are
computed on other paths. Only inside attention are paths spread over padded rows, in a few tensors of similar widths.
The keys of a shared node are gathered into every path through it, and autograd sums their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from drumroll.batch import Path
from drumroll.models.attention import _repeat_heads, band_mask
from drumroll.processes.accelerator import send

WASTE = 1.5
"""The largest ratio of padded to needed work in one call; above it, a second call is cheaper."""
SMALL = 2**18
"""The number of padded query-key pairs below which a separate call does not pay."""


@dataclass
class _Rows:
    """Paths of similar size, as one attention call. Padding uses node 0 and the last position, and its output is never read."""

    queries: Tensor  # [rows, queries] nodes
    keys: Tensor  # [rows, keys] nodes
    places: Tensor  # [rows, queries] positions of the queries in their paths
    causal: bool  # every path starts at a root, so causality hides the padding and no mask is needed
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: Sequence[Path], device: torch.device) -> _Rows:
        rows, wide, long = len(paths), max(p.size[0] for p in paths), max(p.size[1] for p in paths)
        queries, keys = torch.zeros(rows, wide, dtype=torch.int64), torch.zeros(rows, long, dtype=torch.int64)
        for row, path in enumerate(paths):
            queries[row, : path.size[0]] = path.nodes[path.start :]
            keys[row, : path.size[1]] = path.nodes
        places = torch.tensor([p.start for p in paths])[:, None] + torch.arange(wide)
        places = places.minimum(torch.tensor([p.size[1] - 1 for p in paths])[:, None])
        causal = all(p.start == 0 for p in paths)
        return cls(send(queries, device), send(keys, device), send(places, device), causal)

    def mask(self, window: int | None) -> Tensor | None:
        if window is not None and window >= self.keys.shape[1]:
            window = None
        if self.causal and window is None:
            return None
        if window not in self.masks:
            columns = torch.arange(self.keys.shape[1], device=self.keys.device)
            self.masks[window] = band_mask(self.places, columns, window)[:, None]
        return self.masks[window]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Return [rows * queries, heads, dim]."""
        spread = [_spread(x, at) for x, at in ((q, self.queries), (k, self.keys), (v, self.keys))]
        keys, values = (_repeat_heads(x, q.shape[1]) for x in spread[1:])
        mask = self.mask(window)
        out = F.scaled_dot_product_attention(spread[0], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


class PrefixTree:
    """A `Layout` in which every node attends to the nodes before it on its path. Each node is computed on exactly one path."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        paths = [path for path in paths if path.size[0]]
        self.rows = [_Rows.of(some, device) for some in _similar(paths)]
        nodes = sum(path.size[0] for path in paths)
        self.place = torch.empty(nodes, dtype=torch.int64)  # of each node among the padded outputs
        self.position = torch.empty(nodes, dtype=torch.int64)
        offset = 0
        for some in _similar(paths):
            wide = max(path.size[0] for path in some)
            for path in some:
                own = path.nodes[path.start :]
                self.place[own] = torch.arange(offset, offset + len(own))
                self.position[own] = torch.arange(path.start, path.size[1])
                offset += wide
        self.place, self.position = send(self.place, device), send(self.position, device)

    def positions(self) -> Tensor:
        """Return the position of each node in its sequence, [1, nodes]."""
        return self.position[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        return torch.cat([rows.attend(q, k, v, scale, window) for rows in self.rows]).index_select(0, self.place)


def _spread(x: Tensor, at: Tensor) -> Tensor:
    """[nodes, heads, dim] → [rows, heads, width, dim]. The backward of `index_select` is faster than that of indexing."""
    return x.index_select(0, at.flatten()).view(*at.shape, *x.shape[1:]).transpose(1, 2)


def _similar(paths: Sequence[Path]) -> list[list[Path]]:
    """Group paths of similar size, to limit padding. Paths from a root form separate groups, because they need no mask."""
    found: list[list[Path]] = []
    needed = wide = long = 0
    for path in sorted(paths, key=lambda p: (p.start > 0, p.size), reverse=True):
        queries, keys = path.size
        needed, wide, long = needed + queries * keys, max(wide, queries), max(long, keys)
        padded = (len(found[-1]) + 1) * wide * long if found else 0
        if not found or (found[-1][-1].start > 0) != (path.start > 0) or padded > max(SMALL, WASTE * needed):
            found.append([])
            needed, wide, long = queries * keys, queries, keys
        found[-1].append(path)
    return found
