"""Who holds which page of the key-value cache: numbers only, no tensors.

A sequence is a chain of pages, each read up to a count of its own, so that a prompt is shared without copying even
when it ends within a page: whoever first goes on writes into the page, all others branch off into pages of their
own. Pages form a tree by content. Those that nobody holds stay until room is needed, and a request whose tokens
begin like something cached (a group's prompt, the earlier turns of an episode) goes on from there. A page is only
ever appended to: what a reader counts as its own never changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override


@dataclass(slots=True, eq=False)
class Page:
    """A page, the tokens written to it, and the pages that go on after so many of them."""

    id: int
    parent: Page | None = None
    offset: int = 0
    tokens: list[int] = field(default_factory=list)
    branches: dict[int, dict[int, list[Page]]] = field(default_factory=dict)
    refs: int = 0
    tree: object = None

    def common(self, tokens: Sequence[int], at: int) -> int:
        """How many of the page's tokens equal those from `at` on."""
        own = self.tokens
        if own == list(tokens[at : at + len(own)]):
            return len(own)
        return next(i for i, token in enumerate(own) if at + i >= len(tokens) or token != tokens[at + i])


@dataclass(slots=True)
class Chain:
    """The pages of one sequence, how many tokens of each it reads, and the position of each one's first token."""

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

    def places(self) -> tuple[list[int], list[int]]:
        """Page and offset of every token."""
        pages = [i for i, count in zip(self.ids, self.counts, strict=True) for _ in range(count)]
        return pages, [offset for count in self.counts for offset in range(count)]


class Pages:
    """Hands out pages, and finds what is already computed."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._free = list(range(count))
        self._idle: dict[Page, None] = {}  # in the order of release, where a page always comes before its parent
        self._root = Page(-1)

    def available(self) -> int:
        """Pages that are free or held by nobody."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int], slot: int) -> Chain:
        """A chain, now held, over the longest beginning of `tokens` that is cached and leaves one to compute."""
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
        while len(chain.pages) > -(-chain.length // self.size) + 1:  # too many half pages: memory would not be bounded
            chain.length -= chain.counts.pop()
            for listed in (chain.pages, chain.ids, chain.starts):
                listed.pop()
        self._hold(chain)
        return chain

    def share(self, chain: Chain, slot: int) -> Chain:
        """The same sequence for one more reader."""
        twin = Chain(slot, [*chain.pages], [*chain.ids], [*chain.counts], [*chain.starts], chain.length)
        self._hold(twin)
        return twin

    def extend(self, chain: Chain, tokens: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Places (pages and offsets) for tokens to be computed now; None when there is no room."""
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
        """Let go; what was computed stays for as long as there is room."""
        for page in reversed(chain.pages):
            page.refs -= 1
            if page.refs == 0:
                if page.tree is self._root:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page.id)

    def forget(self) -> None:
        """Nothing cached so far may be found any more: the weights have changed. Held chains stay as they are."""
        self._root = Page(-1)
        for page in self._idle:
            heapq.heappush(self._free, page.id)
        self._idle.clear()

    def _room(self, chain: Chain) -> int:
        """How many tokens may still be written to the last page: none once another reader went on in it."""
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
        """Give up the page that has been idle longest; nothing hangs on it."""
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
    """Every slot has its own pages, in order: where a token lies depends on nothing but its slot and position."""

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
