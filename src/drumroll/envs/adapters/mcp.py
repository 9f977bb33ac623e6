"""`mcp:python my_server.py` or `mcp:http://host/mcp`: the tools of an MCP server, over stdio or streamable HTTP.

Connections live on an event loop in a separate thread. By default every episode has its own connection. With `shared:
true` all episodes of the process share one, for servers that keep no state between calls.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import shlex
import sys
import tempfile
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from typing_extensions import override

from drumroll.envs.adapters.schema import Schema
from drumroll.envs.adapters.tools import ToolEpisode, ToolError
from drumroll.processes import lifeline
from drumroll.sample import Message

CLOSING = 10.0
T = TypeVar("T")


class ServerConnection:
    """One connection to a server."""

    def __init__(self, server: str, env: dict[str, str] | None, seconds: float) -> None:
        self.server, self.env, self.seconds = server, env, seconds
        self.schemas: list[Schema] = []
        self._over = asyncio.Event()
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and list the tools. A task holds the connection, so that it is closed in the task that opened it."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready))
        await ready

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        with tempfile.TemporaryFile("w+") as stderr:
            try:
                async with Client(self._target(stderr), read_timeout_seconds=self.seconds) as client:
                    self._client = client
                    self.schemas = await _tools(client)
                    ready.set_result(None)
                    await self._over.wait()
            except Exception as error:
                if not ready.done():
                    stderr.seek(0)
                    last = stderr.read().strip().splitlines()[-1:]
                    reason = "; ".join([_innermost(error), *last])
                    ready.set_exception(ConnectionError(f"the MCP server '{self.server}' cannot be used: {reason}"))

    def _target(self, stderr: Any) -> Any:
        if self.server.startswith(("http://", "https://")):
            return self.server
        command, *arguments = shlex.split(self.server)
        command = sys.executable if command == "python" else command
        command, *arguments = lifeline.guarded([command, *arguments])
        return stdio_client(StdioServerParameters(command=command, args=arguments, env=self.env), errlog=stderr)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text; raise `ToolError` if it failed."""
        assert self._client is not None
        result = await self._client.call_tool(name, arguments)
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Disconnect; this ends a server on stdio."""
        self._over.set()
        if self._task is not None:
            await self._task


async def _tools(client: Client) -> list[Schema]:
    """Return all tools of a server as OpenAI schemas."""
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema}}
        for t in found
    ]


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    atexit.register(_leave)
    return loop


async def _there(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop of the connections and return its result."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


_shared: dict[tuple[Any, ...], asyncio.Task[ServerConnection]] = {}


async def _one(server: str, env: dict[str, str] | None, seconds: float) -> ServerConnection:
    """Return the shared connection. The first caller opens it; one that failed is opened again."""
    key = (server, tuple(sorted((env or {}).items())))
    if key not in _shared or (_shared[key].done() and (_shared[key].cancelled() or _shared[key].exception())):
        _shared[key] = asyncio.create_task(_opened(server, env, seconds))
    return await asyncio.shield(_shared[key])


async def _opened(server: str, env: dict[str, str] | None, seconds: float) -> ServerConnection:
    connection = ServerConnection(server, env, seconds)
    await connection.open()
    return connection


async def _close_all() -> None:
    for opened in _shared.values():
        with suppress(Exception):
            await (await opened).close()


def _leave() -> None:
    """Close the shared connections when the process exits, which ends servers on stdio."""
    with suppress(Exception):
        asyncio.run_coroutine_threadsafe(_close_all(), _loop()).result(CLOSING)


class Mcp(ToolEpisode):
    """The tools of an MCP server.

    `env`: variables for a server on stdio. `seconds`: the time limit of a call. `shared`: one connection for all
    episodes.
    """

    def __init__(
        self, name: str, env: dict[str, str] | None = None, seconds: float = 60.0, shared: bool = False, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.server, self.env, self.seconds, self.shared = name, env, seconds, shared
        self.connection: ServerConnection | None = None
        self.closed = False

    async def reset(self, seed: int, **row: Any) -> list[Message]:
        """Connect, and return the server's tools and the row's task."""
        self.connection = await _there((_one if self.shared else _opened)(self.server, self.env, self.seconds))
        if self.closed:  # the episode was closed in the meantime
            self.close()
        self.schemas = self.connection.schemas
        return self.begin(seed, row)

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        assert self.connection is not None
        return await _there(self.connection.call(name, arguments))

    @override
    def close(self) -> None:
        self.closed = True
        if self.connection is not None and not self.shared:
            asyncio.run_coroutine_threadsafe(self.connection.close(), _loop())
