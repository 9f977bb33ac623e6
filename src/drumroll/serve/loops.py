"""The event loop that agents run on: a thread of its own, given up for a new one when an agent blocks it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds in which a loop that is not blocked answers."""


class AgentLoop:
    """Runs coroutines elsewhere; to wait for one, or to give it up, is as if it ran here."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Any = None

    async def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns or raises; it is made in the thread that runs it."""

        async def made() -> T:
            return await make()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(), self._running()))

    def client(self, base_url: str, api_key: str) -> Any:
        """In the loop's thread: an `openai` client. Connections are shared."""
        if self._client is None:
            from openai import AsyncOpenAI

            self._client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0)
        return self._client.with_options(base_url=base_url)

    async def check(self) -> None:
        """Leave a loop behind that does not answer: whatever blocks it would block all agents to come."""
        loop = self._loop
        with suppress(RuntimeError, TimeoutError):
            await asyncio.wait_for(self.run(lambda: asyncio.sleep(0)), PATIENCE)
            return
        if self._loop is loop:
            self._loop = self._thread = self._client = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(loop,), name="agents", daemon=True)
            self._thread.start()
        return self._loop

    async def close(self) -> None:
        """Cancel what runs, and end the thread unless it is blocked."""
        loop, thread, client = self._loop, self._thread, self._client
        if loop is None or thread is None:
            return

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if client is not None:
                await client.close()

        with suppress(TimeoutError):
            await asyncio.wait_for(self.run(end), PATIENCE)
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join, PATIENCE)
        self._loop = self._thread = self._client = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
