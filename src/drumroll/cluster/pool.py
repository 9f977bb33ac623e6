"""A pool of processes for functions that may hang or crash: a call past its deadline costs one process, never the run.

Workers are fresh interpreters that import the function by its path, so they share nothing with the run: no torch, no
locks, no open files. They are started when first needed and replaced when they die.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from typing_extensions import override

HEADER = 8
IDLE_SECONDS = 60.0


class WorkerDied(RuntimeError):
    """The process ended in the middle of a call."""


class RemoteError(Exception):
    """The function raised; `kind` is the exception's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)  # so that it can travel
        self.kind = kind
        self.text = text

    @override
    def __str__(self) -> str:
        return self.text


class KillablePool:
    """Runs `module:function` calls in up to `size` processes, each call with a deadline of its own.

    It scales by load: a process is started when all others are busy, and ended when it has had nothing to do for a while.
    """

    def __init__(self, size: int, search: list[str] | None = None) -> None:
        self.size = size
        self.restarts = 0
        self._search = search
        self._idle: list[tuple[float, asyncio.subprocess.Process]] = []  # the longest idle first
        self._reaping: list[asyncio.Task[None]] = []
        self._places = asyncio.Semaphore(size)

    async def call(self, path: str, arguments: dict[str, Any], seconds: float) -> Any:
        """The function's result. `TimeoutError` past the deadline, which counts from when a worker is free."""
        async with self._places:
            worker = self._idle.pop()[1] if self._idle else await self._start()
            try:
                async with asyncio.timeout(seconds):
                    ok, value = await self._exchange(worker, (path, arguments))
            except BaseException:
                self._kill(worker)
                raise
            now = time.monotonic()
            self._idle.append((now, worker))
            while self._idle[0][0] < now - IDLE_SECONDS:
                self._reaping.append(asyncio.create_task(_end(self._idle.pop(0)[1])))
        if not ok:
            raise RemoteError(*value)
        return value

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "drumroll.cluster.pool"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert worker.stdin is not None
        _write(worker.stdin, self._search or sys.path)
        return worker

    async def _exchange(self, worker: asyncio.subprocess.Process, job: Any) -> tuple[bool, Any]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            _write(worker.stdin, job)
            await worker.stdin.drain()
            size = int.from_bytes(await worker.stdout.readexactly(HEADER), "little")
            return pickle.loads(await worker.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await worker.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise WorkerDied(f"the worker process {how}") from None

    def _kill(self, worker: asyncio.subprocess.Process) -> None:
        self.restarts += 1
        self._reaping.append(asyncio.create_task(_end(worker)))

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*self._reaping, *(_end(worker) for _, worker in self._idle), return_exceptions=True)
        self._reaping.clear()
        self._idle.clear()


async def _end(worker: asyncio.subprocess.Process) -> None:
    """Kill a process and wait until it and its pipes are gone."""
    with suppress(ProcessLookupError):
        worker.kill()
    with suppress(ConnectionError):
        await worker.communicate()


def _write(stream: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(HEADER, "little") + data)


def serve() -> None:
    """A worker's life: read a call, run it, answer; until the pipe closes. The user's prints go to standard error."""
    from drumroll.registry import import_path

    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.close(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def read() -> Any:
        header = calls.read(HEADER)
        return pickle.loads(calls.read(int.from_bytes(header, "little"))) if len(header) == HEADER else None

    sys.path[:] = read() or sys.path
    functions: dict[str, Any] = {}
    while (job := read()) is not None:
        path, arguments = job
        try:
            if path not in functions:
                functions[path] = import_path(path, "reward")
            answer = pickle.dumps((True, functions[path](**arguments)))
        except BaseException as error:
            answer = pickle.dumps((False, (type(error).__name__, str(error))))
        answers.write(len(answer).to_bytes(HEADER, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    serve()
