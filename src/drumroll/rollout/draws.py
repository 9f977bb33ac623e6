"""The draw order: which prompts were drawn, which wait to be started, and which have no fate yet.

Every drawn prompt has a number, its draw. A checkpoint keeps the place in the draw order: a resumed run draws the open
prompts again and skips the settled ones. Nothing here knows of samples, engines or time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from drumroll.sample import Prompt


class Source(Protocol):
    """Where prompts come from: one row of draws, each prompt of a stream with a share in every batch."""

    @property
    def shares(self) -> Mapping[str, float]: ...
    def draw(self) -> Prompt | None: ...
    def exhausted(self) -> bool: ...
    def metrics(self) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt, its draw, which attempt at it comes next, and the source's state before it was drawn."""

    draw: int
    prompt: Prompt
    attempt: int
    before: dict[str, Any]


class Draws:
    """Draws prompts from a source by stream, and keeps those whose fate is open."""

    def __init__(self, source: Source, *, ordered: bool) -> None:
        self.source = source
        self.ordered = ordered
        self.undecided: dict[str, deque[int]] = {}  # when ordered: by stream, the draws that are not decided, in order
        self.open: dict[int, DrawnPrompt] = {}  # started, without a fate
        self._next_draw = 0
        self._waiting: dict[str, list[tuple[int, DrawnPrompt]]] = {}  # by stream, heaps by draw: drawn, to be started
        self._settled_before: set[int] = set()  # draws that had their fate when the run was resumed

    def next(self, streams: Set[str]) -> DrawnPrompt | None:
        """Return the first draw of these streams to be started. Draws of other streams on the way to it wait."""
        waiting = [heap for stream in streams if (heap := self._waiting.get(stream))]
        if waiting:
            return heapq.heappop(min(waiting, key=lambda heap: heap[0][0]))[1]
        while True:
            draw, before = self._next_draw, self.source.state()
            prompt = self.source.draw()
            if prompt is None:
                return None
            self._next_draw += 1
            if draw in self._settled_before:
                self._settled_before.discard(draw)
                continue
            if self.ordered:
                self.undecided.setdefault(prompt.stream, deque()).append(draw)
            drawn = DrawnPrompt(draw, prompt, 0, before)
            if prompt.stream in streams:
                return drawn
            self.start_later(drawn)

    def start_later(self, drawn: DrawnPrompt) -> None:
        """Let a draw wait; `next` returns it before it draws a new prompt of the stream."""
        heapq.heappush(self._waiting.setdefault(drawn.prompt.stream, []), (drawn.draw, drawn))

    def exhausted(self) -> bool:
        """Whether no draw is left to be started."""
        return self.source.exhausted() and not any(self._waiting.values())

    def state(self) -> dict[str, Any]:
        """Return the place in the draw order: every draw before `draw` is settled, and so are those in `settled`."""
        opened = [*self.open.values(), *(drawn for heap in self._waiting.values() for _, drawn in heap)]
        if not opened:
            return {"draw": self._next_draw, "settled": [], "source": self.source.state()}
        first = min(opened, key=lambda drawn: drawn.draw)
        still_open = {drawn.draw for drawn in opened}
        settled = [draw for draw in range(first.draw, self._next_draw) if draw not in still_open]
        return {"draw": first.draw, "settled": settled, "source": first.before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's place: draw the open prompts again, skip the settled ones."""
        self._next_draw = state["draw"]
        self._settled_before = set(state["settled"])
        self.source.restore(state["source"])
