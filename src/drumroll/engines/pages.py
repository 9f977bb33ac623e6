"""Bookkeeping of the paged key-value cache: page numbers only, no tensors.

A sequence is a chain of pages, each with the number of tokens that the sequence reads of it. So sequences share a
prompt without copying even if it ends within a page: the first to continue writes into the page, all others branch off
into new pages. Pages form a tree by content. Pages without holders stay until room is needed, and a request whose
tokens start like a cached sequence (a group's prompt, the earlier turns of an episode) continues from there. Pages are
append-only: the tokens that a reader counts never change.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override


@dataclass(slots=True, eq=False)
class Page:
    """A page, the tokens written to it, and its child pages, keyed by the number of tokens after which they branch off."""

    id: int
    parent: Page | None = None
    offset: int = 0
    tokens: list[int] = field(default_factory=list)
    branches: dict[int, dict[int, list[Page]]] = field(default_factory=dict)
    refs: int = 0
    tree: object = None

    def common(self, tokens: Sequence[int], at: int) -> int:
        """Return how many of the page's tokens equal those of `tokens` from `at` on."""
        own = self.tokens
        if own == list(tokens[at : at + len(own)]):
            return len(own)
        return next(i for i, token in enumerate(own) if at + i >= len(tokens) or token != tokens[at + i])


@dataclass(slots=True)
class Chain:
    """The pages of one sequence, how many tokens of each it reads, and the position of each page's first token."""

    slot: int = 0
    pages: list[Page] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, page: Page, count: int) -> None:
        self.pages.append(page)
        self.ids.append(page.id)
        self.counts.append(count)
        self.starts.append(self.length)
        self.length += count

    def page_slots(self) -> tuple[list[int], list[int]]:
        """Return the page and offset of every token."""
        pages = [i for i, count in zip(self.ids, self.counts, strict=True) for _ in range(count)]
        return pages, [offset for count in self.counts for offset in range(count)]


class Pages:
    """Allocates pages, and finds sequences that are already computed."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free = list(range(count))
        self._idle: dict[Page, None] = {}  # in order of release, so a page always comes before its parent
        self._root = Page(-1)

    def available(self) -> int:
        """Return the number of pages that are free or without holders."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int], slot: int) -> Chain:
        """Return a chain, now held, over the longest cached prefix of `tokens` that leaves at least one token to compute."""
        found: list[tuple[Page, int]] = []
        page, at, common = self._root, 0, 0
        while True:
            options = [
                (offset + child.common(tokens, at + offset), offset, child)
                for offset, by_token in page.branches.items()
                if offset <= common and at + offset < len(tokens)
                for child in by_token.get(tokens[at + offset], ())
            ]
            reach, offset, child = max(options, key=lambda option: option[0], default=(0, 0, page))
            if reach <= common:
                break
            found.append((page, offset))
            page, at, common = child, at + offset, reach - offset
        chain = Chain(slot)
        for each, read in [*found, (page, common)][1:]:
            if count := min(read, len(tokens) - 1 - chain.length):
                chain.add(each, count)
        while len(chain.pages) > -(-chain.length // self.size) + 1:  # too many half-filled pages: memory would not be bounded
            chain.length -= chain.counts.pop()
            for listed in (chain.pages, chain.ids, chain.starts):
                listed.pop()
        self._hold(chain)
        return chain

    def share(self, chain: Chain, slot: int) -> Chain:
        """Return the same sequence for one more reader."""
        twin = Chain(slot, [*chain.pages], [*chain.ids], [*chain.counts], [*chain.starts], chain.length)
        self._hold(twin)
        return twin

    def extend(self, chain: Chain, tokens: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Reserve pages and offsets for tokens to be computed now; None if there is no room."""
        room = self._room(chain)
        if -(-max(0, len(tokens) - room) // self.size) > self.available():
            return None
        pages, offsets, done = [], [], 0
        while done < len(tokens):
            if not self._room(chain):
                self._add_page(chain, tokens[done])
            page = chain.pages[-1]
            new = tokens[done : done + self.size - len(page.tokens)]
            pages += [page.id] * len(new)
            offsets += range(len(page.tokens), len(page.tokens) + len(new))
            page.tokens += new
            chain.counts[-1] += len(new)
            chain.length += len(new)
            done += len(new)
        return pages, offsets

    def release(self, chain: Chain) -> None:
        """Release a chain; its pages stay cached as long as there is room."""
        for page in reversed(chain.pages):
            page.refs -= 1
            if page.refs == 0:
                if page.tree is self._root:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page.id)

    def forget(self) -> None:
        """Make everything cached so far unfindable, because the weights have changed. Held chains stay valid."""
        self._root = Page(-1)
        for page in self._idle:
            heapq.heappush(self._free, page.id)
        self._idle.clear()

    def _room(self, chain: Chain) -> int:
        """Return how many tokens fit into the last page; 0 once another reader has continued in it."""
        if not chain.pages or len(chain.pages[-1].tokens) != chain.counts[-1]:
            return 0
        return self.size - chain.counts[-1]

    def _add_page(self, chain: Chain, first: int) -> None:
        if not self._free:
            self._evict()
        parent, offset = (chain.pages[-1], chain.counts[-1]) if chain.pages else (self._root, 0)
        page = Page(heapq.heappop(self._free), parent, offset, refs=1, tree=parent.tree or self._root)
        parent.branches.setdefault(offset, {}).setdefault(first, []).append(page)
        chain.add(page, 0)

    def _evict(self) -> None:
        """Evict the page that has been idle longest; it has no children."""
        page = next(iter(self._idle))
        del self._idle[page]
        assert page.parent is not None
        assert not page.branches
        by_token = page.parent.branches[page.offset]
        by_token[page.tokens[0]].remove(page)
        if not by_token[page.tokens[0]]:
            del by_token[page.tokens[0]]
            if not by_token:
                del page.parent.branches[page.offset]
        heapq.heappush(self._free, page.id)

    def _hold(self, chain: Chain) -> None:
        for page in chain.pages:
            page.refs += 1
            self._idle.pop(page, None)


class FixedPages(Pages):
    """Gives every slot its own pages, in order: a token's position in memory depends only on its slot and position."""

    def __init__(self, slots: int, per_slot: int, size: int) -> None:
        super().__init__(0, size)
        self.per_slot = per_slot
        self.slots = slots

    @override
    def available(self) -> int:
        return self.slots * self.per_slot

    @override
    def match(self, tokens: Sequence[int], slot: int) -> Chain:
        return Chain(slot)

    @override
    def release(self, chain: Chain) -> None:
        pass

    @override
    def _add_page(self, chain: Chain, first: int) -> None:
        chain.add(Page(chain.slot * self.per_slot + len(chain.pages)), 0)
