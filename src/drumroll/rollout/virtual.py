"""An asyncio event loop on virtual time: nothing sleeps, and the same program gives the same order of events.

When nothing is ready, the clock jumps to the next timer. The simulation uses it; the simulated code needs no change.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait forever."""


class _Selector(selectors.DefaultSelector):
    """Advances the clock instead of waiting for files."""

    now = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while code runs."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    @override
    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
