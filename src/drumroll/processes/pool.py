"""A pool of worker processes for functions that may hang or crash: a call past its deadline costs one process, never the run.

Workers are fresh interpreters that import the function by its path, or receive it pickled (`objects.py`), so they share
nothing with the run: no torch, no locks, no open files. The pool starts them on demand and replaces them when they die. A function runs on its worker's
main thread, where signals work. The time to import a function does not count against the first call. Each worker leads
its own process group, and the pool kills the whole group, so processes that a function forks cannot hold anything up.

A worker handles one call at a time, and callers are served in order. The pool pickles a call's arguments only when a
worker is free, so the memory of calls in flight is bounded by the size of the pool.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from drumroll import objects
from drumroll.processes import lifeline
from drumroll.processes.deadline import CpuTimeExceeded, Deadline, MachineBusy, cpu_limit

HEADER = 8
IDLE_SECONDS = 60.0
IMPORT_SECONDS = 300.0
"""Seconds that the import of a function may take."""


class WorkerDied(RuntimeError):
    """The worker process ended in the middle of a call."""


class RemoteError(Exception):
    """The function raised.

    `kind` is the name of the exception, `frames` the traceback frames that belong to the user's code.
    """

    def __init__(self, kind: str, text: str, frames: str = "") -> None:
        super().__init__(kind, text, frames)
        self.kind, self.text, self.frames = kind, text, frames

    @override
    def __str__(self) -> str:
        return self.text


@dataclass
class _Worker:
    """A worker process, the functions it has imported, and the time since which it has been idle."""

    process: asyncio.subprocess.Process
    knows: set[str] = field(default_factory=set)
    idle_since: float = 0.0


class KillablePool:
    """Runs `module:function` calls in up to `size` processes, each call with its own deadline.

    The pool scales with load: it starts a process when all others are busy, and ends one that has been idle for a
    while. `struck` counts the deadlines that passed, by clock: `cpu` or `wall`.
    """

    def __init__(self, size: int, search: list[str] | None = None, struck: Counter[str] | None = None) -> None:
        self.size = size
        self.restarts = 0
        self.struck = Counter() if struck is None else struck
        self._search = search
        self._idle: list[_Worker] = []  # longest idle first
        self._reaping: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(size)

    async def call(self, path: str, arguments: dict[str, Any], seconds: float, cpu: bool = False) -> Any:
        """Call the function and return its result. The deadline counts from the moment a worker has imported the function.

        The deadline is in run time; past it the call raises `TimeoutError`. With `cpu`, for pure computation, it is in
        CPU time; past it the call raises `CpuTimeExceeded`. `MachineBusy` means that the machine did not give the
        process that much time.
        """
        try:
            return await self._call(path, arguments, Deadline(seconds, cpu))
        except TimeoutError as error:
            self.struck["cpu" if isinstance(error, CpuTimeExceeded) else "wall"] += 1
            raise

    async def _call(self, path: str, arguments: dict[str, Any], deadline: Deadline) -> Any:
        async with self._slots:
            worker = self._take(path) or await self._start()
            try:
                ok: bool = True
                value: Any = None
                if path not in worker.knows:
                    ok, value = await self._exchange(
                        worker, (path, None, None), Deadline(IMPORT_SECONDS), f"importing '{path}' "
                    )
                if ok:
                    worker.knows.add(path)
                    job = (path, arguments, deadline.seconds if deadline.cpu else None)
                    ok, value = await self._exchange(worker, job, deadline)
            except BaseException:
                self.restarts += 1
                self._reap(worker)
                raise
            worker.idle_since = time.monotonic()
            self._idle.append(worker)
            while self._idle[0].idle_since < worker.idle_since - IDLE_SECONDS:
                self._reap(self._idle.pop(0))
        if not ok:
            raise CpuTimeExceeded(value[1]) if deadline.cpu and value[0] == CpuTimeExceeded.__name__ else RemoteError(*value)
        return value

    def _take(self, path: str) -> _Worker | None:
        """Return an idle worker, preferring one that has imported the function. Discard workers that have died."""
        for dead in [w for w in self._idle if w.process.returncode is not None]:
            self._idle.remove(dead)
            self._reap(dead)
        if not self._idle:
            return None
        worker = next((w for w in reversed(self._idle) if path in w.knows), self._idle[-1])
        self._idle.remove(worker)
        return worker

    async def _start(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "drumroll.processes.pool"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        lifeline.guard(process.pid)
        assert process.stdin is not None
        _write(process.stdin, (self._search or sys.path, objects.pack()))
        return _Worker(process)

    async def _exchange(self, worker: _Worker, job: Any, deadline: Deadline, what: str = "") -> tuple[bool, Any]:
        process = worker.process
        try:
            return await deadline.wait(_talk(process, job), process.pid)
        except TimeoutError as error:
            raise (MachineBusy if isinstance(error, MachineBusy) else TimeoutError)(f"{what}{error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            if code == -signal.SIGXCPU and deadline.cpu:
                raise CpuTimeExceeded(f"took longer than {deadline.seconds:g} s of CPU time") from None
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
    """Kill a process and its group, then wait until the process and its pipes are gone."""
    with suppress(ProcessLookupError, PermissionError):  # some systems raise PermissionError for a group of zombies
        os.killpg(worker.pid, signal.SIGKILL)
    with suppress(ConnectionError):
        await worker.communicate()


async def _talk(process: asyncio.subprocess.Process, job: Any) -> Any:
    """Send a worker one job and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    _write(process.stdin, job)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(HEADER), "little")
    return pickle.loads(await process.stdout.readexactly(size))


def _write(stream: asyncio.StreamWriter, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(HEADER, "little") + data)


@contextmanager
def _computing(seconds: float | None) -> Iterator[None]:
    """Limit the CPU time of the block.

    A signal interrupts Python code; SIGXCPU ends C code that does not return, some seconds later.
    """
    if seconds is None:
        yield
        return
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    # the kernel counts a process's whole life in ticks, so it is off by a few percent
    last = math.ceil(1.05 * time.process_time() + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (last if hard == resource.RLIM_INFINITY else min(last, hard), hard))
    try:
        with cpu_limit(seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def serve() -> None:
    """Serve calls in a worker process: read one, run it, answer, until the pipe closes.

    What user code prints goes to standard error.
    """
    from drumroll.errors import user_frames
    from drumroll.registry import import_path

    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.close(0)
    os.register_at_fork(after_in_child=lambda: (calls.close(), answers.close()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def read() -> Any:
        header = calls.read(HEADER)
        return pickle.loads(calls.read(int.from_bytes(header, "little"))) if len(header) == HEADER else None

    sys.path[:], packed = read() or (sys.path, {})
    objects.unpack(packed)
    functions: dict[str, Any] = {}
    while (job := read()) is not None:
        path, arguments, cpu_seconds = job
        try:
            if arguments is None:
                functions[path], value = import_path(path, "reward"), None
            else:
                with _computing(cpu_seconds):
                    value = functions[path](**arguments)
            answer = pickle.dumps((True, value))
        except BaseException as error:
            answer = pickle.dumps((False, (type(error).__name__, str(error), user_frames(error))))
        answers.write(len(answer).to_bytes(HEADER, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    serve()
