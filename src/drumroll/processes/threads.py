"""Who computes with how many threads.

OpenMP gives every thread that computes a team of its own, and when the teams together outnumber the cores, each stops
spinning: a small operation then takes a hundred microseconds instead of ten, even if all other teams sleep. So whoever
computes does it on a thread that ends with its work, and those who compute at the same time share the cores.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

LINGER = 0.02
"""Seconds that a thread without work waits for more before it ends."""


class Cores:
    """The cores of this process. With `fixed` everyone takes all of them: the last digits depend on how many there are."""

    def __init__(self) -> None:
        self.total = self.default = torch.get_num_threads()  # a core each, unless OMP_NUM_THREADS says otherwise
        self.fixed = False
        self._working = 0
        self._lock = threading.Lock()

    def configure(self, total: int = 0, *, fixed: bool = False) -> None:
        """How many there are, 0 is the default; the calling thread, which only directs, gets one."""
        self.total, self.fixed = total or self.default, fixed
        torch.set_num_threads(1)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Within the block the calling thread computes."""
        with self._lock:
            self._working += 1
        torch.set_num_threads(self.share())
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Within the block the calling thread, which is at work, waits: its cores are others' meanwhile."""
        with self._lock:
            self._working -= 1
        try:
            yield
        finally:
            with self._lock:
                self._working += 1

    def share(self) -> int:
        """Threads for one of those at work."""
        return self.total if self.fixed else max(1, self.total // max(1, self._working))

    def adjust(self) -> None:
        """Take this thread's share as it is now; called between two pieces of work."""
        if torch.get_num_threads() != self.share():
            torch.set_num_threads(self.share())


CORES = Cores()


class SerialExecutor:
    """Runs functions one after the other on a thread that ends when there are none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._some = threading.Condition()
        self._running = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """The function's result, in time."""
        future: Future[Any] = Future()
        with self._some:
            self._jobs.append((function, future))
            if self._running:
                self._some.notify()
            else:
                self._running = True
                threading.Thread(target=self._run, name=self.name, daemon=True).start()
        return future

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._some:
            if not self._jobs:
                self._some.wait(LINGER)
            self._running = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with CORES.work():
                    result = function()
            except BaseException as error:  # it is raised at whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)
            del function, future, job
