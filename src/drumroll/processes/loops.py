"""An event loop in a separate thread that runs the user's coroutines: environments and agents."""

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
"""Seconds within which an unblocked loop responds."""


class Loop:
    """Runs coroutines on another thread's event loop. Awaiting or cancelling one works as if it ran on the caller's loop.

    A coroutine that blocks the loop makes `check` abandon the loop; the next coroutine starts a new one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` creates, and return or raise its result. `make` is called on the loop's thread."""

        async def made() -> T:
            try:
                return await make()
            except SystemExit as error:  # SystemExit would end the loop
                raise RemoteError("SystemExit", str(error), user_frames(error)) from None

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(), self._running()))

    async def run_within(self, seconds: float, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Like `run`, for a coroutine that enforces its own deadline of `seconds`.

        Raises TimeoutError if it blocks past that.
        """
        try:
            async with asyncio.timeout(seconds + PATIENCE):
                return await self.run(make)
        except TimeoutError:
            await self.check()
            raise

    async def check(self) -> None:
        """Abandon the loop if it does not respond: a blocked loop would block every later coroutine."""
        loop = self._loop
        with suppress(RuntimeError, TimeoutError):
            await asyncio.wait_for(self.run(lambda: asyncio.sleep(0)), PATIENCE)
            return
        if self._loop is loop:
            self._loop = self._thread = None

    async def ending(self) -> None:
        """Hook for subclasses: runs on the loop's thread after all coroutines have ended."""

    async def close(self) -> None:
        """Cancel the running coroutines and end the thread, unless it is blocked."""
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
