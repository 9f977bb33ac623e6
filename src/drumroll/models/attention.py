"""Attention shared by the learner and the native engine, so that their numbers agree.

Both run Hugging Face's own module on tokens laid end to end, shape [1, tokens]; the linear layers never see padding. A
`Layout`, passed through the module's forward as a keyword, decides which tokens attend to which. The function
registered with transformers under `NAME` only unpacks the heads and passes them to the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from drumroll.models.kernels import paged_decode
from drumroll.processes.accelerator import send

NAME = "drumroll"
HIDDEN = -1e30  # a score with weight 0 that is still finite: a window may hide a whole page
IN_PLACE = 0.7  # read a span of pages without gathering if at least this share of it is needed


class Layout(Protocol):
    """Decides which tokens a packed row of tokens attends to."""

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
    """Register the attention with transformers. Models that use it do not build masks themselves."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[rows, kv heads, tokens, dim] → [rows, heads, tokens, dim] for grouped-query attention."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


class Packed:
    """Whole sequences laid end to end; each attends causally to itself only.

    Only inside attention are the sequences spread over rows of equal width. Padding is on the right, where causality
    already hides it, so no mask is needed. The host knows the lengths, so it computes all indices: a mask would make it
    wait for the device in every layer.
    """

    def __init__(self, lengths: Sequence[int], device: Any = "cpu") -> None:
        sizes = np.array(lengths, np.int64)
        columns = np.arange(sizes.max())
        valid = columns < sizes[:, None]
        starts = np.cumsum(sizes) - sizes
        self.index = send(np.where(valid, starts[:, None] + columns, 0), device)  # [sequences, width] tokens
        self.place = send(np.flatnonzero(valid), device)  # [tokens] of each among the padded ones

    def positions(self) -> Tensor:
        """Return the position of each token in its own sequence, [1, tokens]."""
        return (self.place % self.index.shape[1])[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        rows = [x[self.index].transpose(1, 2) for x in (q, k, v)]
        heads, width = q.shape[1], self.index.shape[1]
        keys, values = (_repeat_heads(x, heads) for x in rows[1:])
        if window is None or window >= width:
            out = F.scaled_dot_product_attention(rows[0], keys, values, is_causal=True, scale=scale)
        else:
            mask = band_mask(torch.arange(width, device=q.device), torch.arange(width, device=q.device), window)
            out = F.scaled_dot_product_attention(rows[0], keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


def band_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """True where the query at a position may see the key at a position: causal, within the window."""
    distance = queries[..., :, None] - keys[..., None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


class KVCache:
    """Keys and values of every layer in pages of `size` tokens, [pages, kv heads, size, dim]."""

    def __init__(self, shapes: list[tuple[int, int]], pages: int, size: int, dtype: torch.dtype, device: Any) -> None:
        def make(heads: int, dim: int) -> Tensor:
            shape = (pages, heads, size, dim)
            if torch.device(device).type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # memory is committed only where it is written
            return torch.from_numpy(zeros).view(dtype).view(shape)

        self.size = size
        self.keys = [make(*shape) for shape in shapes]
        self.values = [make(*shape) for shape in shapes]
        self._scratch: dict[int, Tensor] = {}

    def write(self, layer: int, at: PageSlots, k: Tensor, v: Tensor) -> None:
        """Write [tokens, kv heads, dim] to their page slots."""
        self.keys[layer][at.pages, :, at.offsets] = k
        self.values[layer][at.pages, :, at.offsets] = v

    def copy(self, source: PageSlots, target: PageSlots) -> None:
        """Copy tokens from one set of page slots to another, in all layers."""
        for store in (*self.keys, *self.values):
            store[target.pages, :, target.offsets] = store[source.pages, :, source.offsets]

    def gather(self, store: Tensor, pages: Tensor, buffer: int) -> Tensor:
        """Gather pages into a reused buffer: fresh memory costs more than the copy."""
        held = self._scratch.get(buffer)
        if held is None or len(held) < len(pages) or held.shape[1:] != store.shape[1:]:
            held = self._scratch[buffer] = store.new_empty(len(pages) + len(pages) // 4, *store.shape[1:])
        return torch.index_select(store, 0, pages, out=held[: len(pages)])

    def nbytes(self) -> int:
        """Return the memory of the cache in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class PageSlots:
    """The page slots of some tokens: a page and an offset in it for each."""

    def __init__(self, pages: list[int], offsets: list[int], device: Any) -> None:
        self.pages, self.offsets = send(np.array((pages, offsets), np.int64), device)


class Prefill:
    """A layout for the next tokens of some sequences, laid end to end and written to the cache.

    The first tokens, of `fresh` lengths, start their sequences and attend as in `Packed`. The tokens of `continuing`
    sequences attend to their whole sequence, whose page slots include the new tokens.
    """

    def __init__(self, cache: KVCache, at: PageSlots, fresh: list[int], continuing: list[tuple[int, PageSlots]]) -> None:
        self.cache = cache
        self.at = at
        self.packed = Packed(fresh, at.pages.device) if fresh else None
        self.fresh = sum(fresh)
        self.continuing = continuing
        self.masks: dict[tuple[int, int | None], Tensor] = {}

    def _mask(self, index: int, window: int | None) -> Tensor:
        if (index, window) not in self.masks:
            new, places = self.continuing[index]
            positions = torch.arange(len(places.pages), device=places.pages.device)
            self.masks[index, window] = band_mask(positions[-new:], positions, window)
        return self.masks[index, window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self.cache.write(layer, self.at, k, v)
        n = self.fresh
        out = [self.packed.attend(layer, q[:n], k[:n], v[:n], scale, window)] if self.packed else []
        for index, (new, places) in enumerate(self.continuing):
            keys, values = (
                _repeat_heads(store[places.pages, :, places.offsets].transpose(0, 1)[None], q.shape[1])
                for store in (self.cache.keys[layer], self.cache.values[layer])
            )
            queries = q[n : n + new].transpose(0, 1)[None]
            mask = self._mask(index, window)
            seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            out.append(seen[0].transpose(0, 1))
            n += new
        return torch.cat(out)


@dataclass(frozen=True, slots=True)
class Reads:
    """Which row reads which page: parallel arrays, with the number of tokens it reads and the position of the first."""

    pages: NDArray[np.int64]
    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]


class _Part:
    """Pages read together, up to `width` tokens of each. `rows[i]` reads page i; the row number `nobody` is padding.

    `rows` and `counts`, [pages, columns], and `starts`, [pages], are the host's.
    """

    def __init__(
        self,
        pages: Tensor | slice,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        nobody: int,
        device: torch.device,
        width: int | None = None,
    ) -> None:
        self.pages = pages
        self.width = int(counts.max()) if width is None else width
        self.rows = rows
        self.ask = send(np.minimum(rows, nobody - 1), device)
        self.counts = send(counts, device)
        self.starts = send(starts, device)

    def mask(self, positions: Tensor, queries: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return an additive mask, [pages, 1, columns × queries, width]: 0 where a row may look."""
        columns = torch.arange(self.width, device=positions.device)
        hidden = columns >= self.counts[..., None]
        if window is not None:
            distance = (positions[self.ask] - self.starts[:, None])[..., None] - columns
            hidden = hidden | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
            hidden, max(HIDDEN, torch.finfo(dtype).min / 2)
        )
        return mask.repeat_interleave(queries, dim=1)[:, None]


class Decode:
    """A layout with one new token per row, which attends to the pages that the row holds.

    Work is organised by page, not by row: a page that a single row reads is read in place, and a page that several rows
    share is read once for all of them. The results that a row gets from its pages, relative to its highest score, are
    summed. The heads that share a key head are laid out as queries of it. With `whole` each row has its own pages,
    which cover the cache in order, and shapes do not depend on their content. Compiled kernels do all this if they are
    available.
    """

    def __init__(self, cache: KVCache, at: PageSlots, positions: Tensor, reads: Reads, *, whole: bool = False) -> None:
        self.cache = cache
        self.at = at
        self.positions = positions
        self.rows = len(positions)
        self.device = positions.device
        self.reads = reads
        self.whole = whole
        self.masks: dict[tuple[int, int, int | None], Tensor] = {}
        self.compiled = paged_decode(cache, at, positions, reads)

    @cached_property
    def parts(self) -> list[_Part]:
        """The groups of pages that are read together."""
        if self.whole:
            return [self._alone(self.reads, slice(0, len(self.cache.keys[0])), self.cache.size)]
        return self._split(self.reads)

    def _split(self, reads: Reads) -> list[_Part]:
        """Group pages by similar numbers of readers, so that few columns are empty."""
        _, inverse, readers = np.unique(reads.pages, return_inverse=True, return_counts=True)
        size = np.ceil(np.log2(readers)).astype(np.int64)[inverse]
        parts = []
        for own in np.unique(size):
            some = Reads(*(x[size == own] for x in (reads.pages, reads.rows, reads.counts, reads.starts)))
            if own:
                parts.append(self._together(some))
                continue
            low, high = int(some.pages.min()), int(some.pages.max()) + 1
            parts.append(self._alone(some, slice(low, high) if len(some.pages) > IN_PLACE * (high - low) else None))
        return parts

    def _alone(self, reads: Reads, span: slice | None, width: int | None = None) -> _Part:
        """Make a part of pages with one reader: a span of the cache in place, or gathered."""
        if span is None:
            pages = send(reads.pages, self.device)
            return _Part(pages, reads.rows[:, None], reads.counts[:, None], reads.starts, self.rows, self.device)
        count = span.stop - span.start
        rows, counts, starts = np.full(count, self.rows), np.zeros(count, np.int64), np.zeros(count, np.int64)
        place = reads.pages - span.start
        rows[place], counts[place], starts[place] = reads.rows, reads.counts, reads.starts
        return _Part(span, rows[:, None], counts[:, None], starts, self.rows, self.device, width)

    def _together(self, reads: Reads) -> _Part:
        """Make a part of pages with several readers, one column each."""
        order = np.argsort(reads.pages, kind="stable")
        pages, first, readers = np.unique(reads.pages[order], return_index=True, return_counts=True)
        column = np.arange(len(order)) - np.repeat(first, readers)
        page = np.repeat(np.arange(len(pages)), readers)
        rows, counts = np.full((len(pages), readers.max()), self.rows), np.zeros((len(pages), readers.max()), np.int64)
        rows[page, column], counts[page, column] = reads.rows[order], reads.counts[order]
        return _Part(send(pages, self.device), rows, counts, reads.starts[order][first], self.rows, self.device)

    @cached_property
    def by_row(self) -> tuple[Tensor, Tensor]:
        """The reads of each row, [rows, most reads of one], padded with any read, and a mask for the padding.

        The mask, [rows, most reads, 1, 1], is added to the reads' log-weights, so that padding weighs nothing.
        """
        back = np.concatenate([part.rows.ravel() for part in self.parts])
        order = np.argsort(back, kind="stable")
        counts = np.bincount(back, minlength=self.rows + 1)
        first = np.minimum(counts.cumsum() - counts, len(back) - 1)[:-1]
        columns = np.arange(max(1, counts[:-1].max()))
        own = columns < counts[:-1, None]
        reads = send(order[first[:, None] + np.where(own, columns, 0)], self.device)
        return reads, send(np.where(own, 0, -1), self.device)[..., None, None] * -HIDDEN

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        if self.compiled is not None and self.compiled.fits(q, k):
            return self.compiled.attend(layer, q, k, v, scale, window)
        self.cache.write(layer, self.at, k, v)
        queries = q.reshape(self.rows, k.shape[1], -1, q.shape[-1])
        found = [self._read(layer, i, queries, scale, window) for i in range(len(self.parts))]
        seen, heights = (
            torch.cat([_by_reader(x, part) for x, part in zip(column, self.parts, strict=True)])
            for column in zip(*found, strict=True)
        )
        reads, absent = self.by_row
        if reads.shape[1] == 1:
            return seen[reads[:, 0]].reshape(q.shape).to(q.dtype)
        shares = (heights[reads] + absent).softmax(dim=1)
        return (seen[reads] * shares[..., None]).sum(dim=1).reshape(q.shape).to(q.dtype)

    def _pages(self, store: Tensor, part: _Part, buffer: int) -> Tensor:
        return store[part.pages] if isinstance(part.pages, slice) else self.cache.gather(store, part.pages, buffer)

    def _read(self, layer: int, index: int, queries: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        """Return what the readers of a part's pages get from each page, and its log-weight.

        The first has the shape [pages, kv heads, columns × queries, dim].
        """
        part, (_, kv_heads, shared, dim) = self.parts[index], queries.shape
        if (index, shared, window) not in self.masks:
            self.masks[index, shared, window] = part.mask(self.positions, shared, window, queries.dtype)
        pages, columns = part.rows.shape
        asked = queries[part.ask].transpose(1, 2).reshape(pages, kv_heads, columns * shared, dim)
        keys, values = (
            self._pages(store[layer], part, 2 * index + i)[:, :, : part.width]
            for i, store in enumerate((self.cache.keys, self.cache.values))
        )
        return weighed(asked, keys, values, self.masks[index, shared, window], scale)


def weighed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention with an additive mask, and the log of the sum of its weights, [rows, heads, queries], both in float32.

    On a CPU this calls the fused kernel behind `scaled_dot_product_attention` directly, because the public function
    does not return that sum.
    """
    if q.device.type == "cpu":
        out, height = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
        return out.float(), height
    scores = torch.matmul(q * scale, k.transpose(-1, -2)).float() + mask
    height = scores.logsumexp(dim=-1)
    return torch.matmul((scores - height[..., None]).exp().to(v.dtype), v).float(), height


def _by_reader(x: Tensor, part: _Part) -> Tensor:
    """[pages, kv heads, columns × queries, ...] → [pages × columns, kv heads, queries, ...]."""
    return x.unflatten(2, (part.rows.shape[1], -1)).transpose(1, 2).flatten(0, 1)
