"""Attention shared by the learner and the native engine, so that their numbers agree.

Both run Hugging Face's own module on tokens laid end to end, shape [1, tokens]; the linear layers never see
padding. A `Layout`, passed through the module's forward as a keyword, says which tokens attend to which. The
function registered with transformers under `NAME` only unpacks the heads and hands them to the layout.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "drumroll"


class Layout(Protocol):
    """Decides what a packed row of tokens attends to."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [tokens, heads, dim]; k and v [tokens, kv heads, dim]; returns [tokens, heads, dim]."""
        ...


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, heads, tokens, dim] → [1, tokens, heads, dim]."""
    if layout is None:
        raise TypeError("this model runs under drumroll's attention and needs layout=Packed(...) or a cache")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return layout.attend(module.layer_idx, q, k, v, scale, sliding_window)[None], None


def register() -> None:
    """Make the attention known to transformers. Models that name it skip building masks of their own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[rows, kv heads, tokens, dim] → [rows, heads, tokens, dim] for grouped-query attention."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


class Packed:
    """Whole sequences laid end to end; each attends causally to itself and to nothing else.

    Only inside attention are the sequences spread over rows of equal width. Padding stands on the right, where
    causality already hides it, so no mask is needed.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        width = int(lengths.max())
        starts = torch.cumsum(lengths, 0) - lengths
        columns = torch.arange(width, device=lengths.device)
        self.valid = columns < lengths[:, None]
        self.index = torch.where(self.valid, starts[:, None] + columns, 0)

    def positions(self) -> Tensor:
        """The position of each token in its own sequence, [1, tokens]."""
        columns = torch.arange(self.valid.shape[1], device=self.valid.device).expand_as(self.valid)
        return columns[self.valid][None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        rows = [x[self.index].transpose(1, 2) for x in (q, k, v)]
        heads, width = q.shape[1], self.index.shape[1]
        keys, values = (_repeat_heads(x, heads) for x in rows[1:])
        if window is None or window >= width:
            out = F.scaled_dot_product_attention(rows[0], keys, values, is_causal=True, scale=scale)
        else:
            mask = band_mask(torch.arange(width, device=q.device), torch.arange(width, device=q.device), window)
            out = F.scaled_dot_product_attention(rows[0], keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2)[self.valid]


def band_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """True where the query at a position may see the key at a position: causal, within the window."""
    distance = queries[..., :, None] - keys[..., None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


class KVCache:
    """Keys and values of `slots` rows of at most `context` tokens, for every layer."""

    def __init__(self, shapes: list[tuple[int, int]], slots: int, context: int, dtype: torch.dtype, device: Any) -> None:
        def make(heads: int, dim: int) -> Tensor:
            return torch.zeros(slots, heads, context, dim, dtype=dtype, device=device)

        self.keys = [make(*shape) for shape in shapes]
        self.values = [make(*shape) for shape in shapes]

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of one slot to others: group members share their prompt's prefill."""
        for store in (*self.keys, *self.values):
            store[targets, :, :length] = store[source, :, :length]

    def nbytes(self) -> int:
        """Memory held by the cache."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class Prefill:
    """A whole prompt per slot: attends as `Packed` does, and remembers its keys and values in the cache."""

    def __init__(self, cache: KVCache, slots: list[int], lengths: Tensor) -> None:
        self.cache = cache
        self.packed = Packed(lengths)
        self.slot = torch.repeat_interleave(torch.tensor(slots, device=lengths.device), lengths)
        self.position = self.packed.positions()[0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self.cache.keys[layer][self.slot, :, self.position] = k
        self.cache.values[layer][self.slot, :, self.position] = v
        return self.packed.attend(layer, q, k, v, scale, window)


class Decode:
    """One new token for each of the first `rows` slots, attending to what its slot holds.

    The heads that share a key head are laid out as queries of it, so grouped-query attention copies nothing.
    """

    def __init__(self, cache: KVCache, positions: Tensor, width: int) -> None:
        self.cache = cache
        self.positions = positions
        self.rows = torch.arange(len(positions), device=positions.device)
        self.columns = torch.arange(width, device=positions.device)
        self.masks: dict[int | None, Tensor] = {}

    def _mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = band_mask(self.positions[:, None], self.columns, window)[:, None]
        return self.masks[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = k
        values[self.rows, :, self.positions] = v
        rows, width, kv_heads = len(self.rows), len(self.columns), keys.shape[1]
        grouped = q.reshape(rows, kv_heads, -1, q.shape[-1])
        out = F.scaled_dot_product_attention(
            grouped, keys[:rows, :, :width], values[:rows, :, :width], attn_mask=self._mask(window), scale=scale
        )
        return out.reshape(q.shape)
