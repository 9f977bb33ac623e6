"""A pool of processes for functions that may hang or crash: a call past its deadline costs one process, never the run.

Workers are fresh interpreters that import the function by its path, so they share nothing with the run: no torch, no
locks, no open files. They are started when first needed and replaced when they die. Functions run on a worker's main
thread, where signals work. Importing a function is not billed to the call that needs it first.

A worker is given one call at a time, and callers wait their turn in order: what is in flight is bounded by the pool's
size, and what waits by those who call, because nothing is pickled before its turn.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from drumroll.cluster import lifeline

HEADER = 8
IDLE_SECONDS = 60.0
IMPORT_SECONDS = 300.0
"""How long importing a function may take."""


class WorkerDied(RuntimeError):
    """The process ended in the middle of a call."""


class RemoteError(Exception):
    """The function raised; `kind` is the exception's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    @override
    def __str__(self) -> str:
        return self.text


@dataclass
class _Worker:
    """A process, the functions it has imported, and since when it has had nothing to do."""

    process: asyncio.subprocess.Process
    knows: set[str] = field(default_factory=set)
    idle_since: float = 0.0


class KillablePool:
    """Runs `module:function` calls in up to `size` processes, each call with a deadline of its own.

    It scales by load: a process is started when all others are busy, and ended when it has had nothing to do for a while.
    """

    def __init__(self, size: int, search: list[str] | None = None) -> None:
        self.size = size
        self.restarts = 0
        self._search = search
        self._idle: list[_Worker] = []  # the longest idle first
        self._reaping: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(size)

    async def call(self, path: str, arguments: dict[str, Any], seconds: float) -> Any:
        """The function's result. `TimeoutError` past the deadline, which counts from when a worker has the function."""
        async with self._places:
            worker = self._take(path) or await self._start()
            try:
                ok: bool = True
                value: Any = None
                if path not in worker.knows:
                    ok, value = await self._exchange(worker, (path, None), IMPORT_SECONDS, f"importing '{path}' ")
                if ok:
                    worker.knows.add(path)
                    ok, value = await self._exchange(worker, (path, arguments), seconds)
            except BaseException:
                self.restarts += 1
                self._reap(worker)
                raise
            worker.idle_since = time.monotonic()
            self._idle.append(worker)
            while self._idle[0].idle_since < worker.idle_since - IDLE_SECONDS:
                self._reap(self._idle.pop(0))
        if not ok:
            raise RemoteError(*value)
        return value

    def _take(self, path: str) -> _Worker | None:
        """An idle worker, best one that knows the function; those that died meanwhile are forgotten."""
        self._idle = [w for w in self._idle if w.process.returncode is None]
        if not self._idle:
            return None
        worker = next((w for w in reversed(self._idle) if path in w.knows), self._idle[-1])
        self._idle.remove(worker)
        return worker

    async def _start(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "drumroll.cluster.pool"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        lifeline.guard(process.pid)
        assert process.stdin is not None
        _write(process.stdin, self._search or sys.path)
        return _Worker(process)

    async def _exchange(self, worker: _Worker, job: Any, seconds: float, what: str = "") -> tuple[bool, Any]:
        process = worker.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                _write(process.stdin, job)
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(HEADER), "little")
                return pickle.loads(await process.stdout.readexactly(size))
        except TimeoutError:
            raise TimeoutError(f"{what}took longer than {seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise WorkerDied(f"the worker process {how}") from None

    def _reap(self, worker: _Worker) -> None:
        task = asyncio.create_task(_end(worker.process))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*self._reaping, *(_end(worker.process) for worker in self._idle), return_exceptions=True)
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
            if arguments is None:
                functions[path], value = import_path(path, "reward"), None
            else:
                value = functions[path](**arguments)
            answer = pickle.dumps((True, value))
        except BaseException as error:
            answer = pickle.dumps((False, (type(error).__name__, str(error))))
        answers.write(len(answer).to_bytes(HEADER, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    serve()
