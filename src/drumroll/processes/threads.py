"""Shares the CPU cores among the threads of this process that compute.

OpenMP gives every computing thread its own team of threads. When the teams together outnumber the cores, OpenMP stops
spinning, and a small operation takes a hundred microseconds instead of ten, even if all other teams sleep. So
computation runs on threads that end when their work does, and threads that compute at the same time share the cores.
Processes without torch, such as those of rewards, use this file too: it imports torch only when somebody counts cores.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")
LINGER = 0.02
"""Seconds that an idle thread waits for more work before it ends."""
PATIENCE = 1.0
"""Seconds that the end of the process waits for computing threads."""


class Cores:
    """The cores of this process.

    With `fixed` every computing thread uses all cores, because the last digits of a result depend on the number of
    threads.
    """

    def __init__(self) -> None:
        self.fixed = False
        self._total = 0
        self._working = 0
        self._lock = threading.Lock()

    def configure(self, total: int = 0, *, fixed: bool = False) -> None:
        """Set the number of cores (0: the default). The calling thread, which only coordinates, gets one."""
        import torch

        default = self.default  # counted before it is changed
        self._total, self.fixed = total or default, fixed
        torch.set_num_threads(1)

    @cached_property
    def default(self) -> int:
        """One per core, unless OMP_NUM_THREADS says otherwise."""
        import torch

        return torch.get_num_threads()

    @property
    def total(self) -> int:
        """The number of cores that this process uses."""
        return self._total or self.default

    @contextmanager
    def work(self) -> Iterator[None]:
        """Mark the calling thread as computing inside the block, and give it its share of the cores."""
        with self._lock:
            self._working += 1
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(self.share())
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Mark a computing thread as waiting inside the block, so that others may use its cores."""
        with self._lock:
            self._working -= 1
        try:
            yield
        finally:
            with self._lock:
                self._working += 1

    def share(self) -> int:
        """Return the number of threads for one of the computing threads."""
        return self.total if self.fixed else max(1, self.total // max(1, self._working))

    def adjust(self) -> None:
        """Apply the current share to the calling thread; call it between two pieces of work."""
        import torch

        if torch.get_num_threads() != self.share():
            torch.set_num_threads(self.share())


CORES = Cores()


class _Leaving(BaseException):
    """Raised in computing threads when the process ends."""


_leaving = threading.Event()


class ComputingThread(threading.Thread):
    """A daemon thread that computes. When the process ends, it ends between two operations."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    @override
    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            if not _leaving.is_set():
                raise


@atexit.register
def _leave() -> None:
    """End the computing threads. A thread that comes out of C++ code when the interpreter is gone aborts the process."""
    _leaving.set()
    running = [thread for thread in threading.enumerate() if isinstance(thread, ComputingThread)]
    until = time.monotonic() + PATIENCE
    for thread in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Leaving))
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


class SerialExecutor:
    """Runs functions one after the other on a thread that ends when no work is left."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._some = threading.Condition()
        self._running = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function and return the future of its result."""
        future: Future[Any] = Future()
        with self._some:
            self._jobs.append((function, future))
            if self._running:
                self._some.notify()
            else:
                self._running = True
                ComputingThread(self._run, self.name).start()
        return future

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._some:
            if not self._jobs:
                self._some.wait(LINGER)
            self._running = bool(self._jobs) and not _leaving.is_set()
            return self._jobs.popleft() if self._running else None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with CORES.work():
                    result = function()
            except BaseException as error:  # the caller that awaits the future sees the error
                future.set_exception(error)
            else:
                future.set_result(result)
            del function, future, job


async def beside(function: Callable[[], T]) -> T:
    """Run a function that waits for a disk, not for a core, on a thread that the end of the process does not wait for."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # the caller sees the error
            future.set_exception(error)

    ComputingThread(run, "beside").start()
    return await asyncio.wrap_future(future)
