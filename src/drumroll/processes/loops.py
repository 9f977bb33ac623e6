"""An event loop in a thread of its own, for coroutines of the user: environments and agents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from drumroll.errors import user_frames
from drumroll.processes.pool import RemoteError

T = TypeVar("T")
PATIENCE = 2.0
"""Seconds in which a loop that is not blocked answers."""


class Loop:
    """Runs coroutines elsewhere; to wait for one, or to give it up, is as if it ran here. A loop that one blocks is left behind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns or raises; it is made in the thread that runs it."""

        async def made() -> T:
            try:
                return await make()
            except SystemExit as error:  # it would end the loop
                raise RemoteError("SystemExit", str(error), user_frames(error)) from None

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(), self._running()))

    async def run_within(self, seconds: float, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same for a coroutine that keeps a deadline itself, unless it blocks."""
        try:
            async with asyncio.timeout(seconds + PATIENCE):
                return await self.run(make)
        except TimeoutError:
            await self.check()
            raise

    async def check(self) -> None:
        """Leave a loop behind that does not answer: whatever blocks it would block all that come."""
        loop = self._loop
        with suppress(RuntimeError, TimeoutError):
            await asyncio.wait_for(self.run(lambda: asyncio.sleep(0)), PATIENCE)
            return
        if self._loop is loop:
            self._loop = self._thread = None

    async def ending(self) -> None:
        """In the loop's thread, when all that ran is over."""

    async def close(self) -> None:
        """Cancel what runs, and end the thread unless it is blocked."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.ending()

        with suppress(TimeoutError):
            await asyncio.wait_for(self.run(end), PATIENCE)
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join, PATIENCE)
        self._loop = self._thread = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
