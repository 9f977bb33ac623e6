"""Deadlines that do not depend on the load of the machine, so that a verdict never does either.

Pure computation is limited in CPU time. Code that may sleep is limited in run time: wall time minus the time spent
waiting for a core. A generous wall-time limit stands behind both. A process that exceeds only the wall-time limit did
not get the time it is allowed: that is a failure to retry, not a verdict.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from drumroll.processes.clock import RunTime, family

T = TypeVar("T")
TICK = 0.2
"""Seconds between two readings of the clock."""


class CpuTimeExceeded(TimeoutError):
    """A pure computation used up its CPU time.

    It would do so again, so callers may count this as the result and do not retry.
    """


class MachineBusy(TimeoutError):
    """The machine did not give a process the time that it may take. A retry may succeed."""


class RunTimeExceeded(TimeoutError):
    """Processes exceeded their run time, which excludes waiting for a core."""


class _Struck(BaseException):
    """Raised by the timer's signal handler.

    It derives from BaseException so that no library's `except Exception` swallows it.
    """


@dataclass(frozen=True)
class Deadline:
    """The time limit of one answer from a process."""

    seconds: float
    cpu: bool = False
    """The process limits its own CPU time with `cpu_limit`; this side enforces only the wall-time limit."""

    @property
    def wall(self) -> float:
        """The wall-time limit in seconds.

        It leaves room for processes that the kernel ends a few seconds after their CPU limit.
        """
        return max(60.0, 20.0 * self.seconds)

    async def wait(self, answer: Coroutine[Any, Any, T], pid: int) -> T:
        """Await the answer of process `pid`.

        Raises `RunTimeExceeded` if the process and its descendants take longer, and `MachineBusy` past the wall-time
        limit.
        """
        task = asyncio.ensure_future(answer)
        clock = None if self.cpu else RunTime(lambda: family(pid))
        until, pause, late = time.monotonic() + self.wall, min(self.seconds, TICK), None
        try:
            while not (await asyncio.wait({task}, timeout=pause))[0]:
                if late is not None:
                    raise late
                spent = 0.0 if clock is None else clock.look()
                late = self._late(spent, time.monotonic() >= until)
                # wait once more: the answer may already be in the pipe
                pause = TICK if late is not None else min(self.seconds - spent, TICK)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _late(self, spent: float, too_busy: bool) -> TimeoutError | None:
        if spent >= self.seconds:
            return RunTimeExceeded(f"took longer than {self.seconds:g} s")
        what = f"{self.seconds:g} s of {'CPU' if self.cpu else 'run'} time within {self.wall:g} s"
        return MachineBusy(f"did not get {what}: the machine is too busy") if too_busy else None


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `CpuTimeExceeded` once this process has used this much CPU time inside the block.

    Main thread only; blocks may nest.
    """

    def strike(*_: Any) -> None:
        raise _Struck

    began = time.process_time()
    handler = signal.signal(signal.SIGPROF, strike)
    outer, _ = signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _Struck:
        raise CpuTimeExceeded(f"took longer than {seconds:g} s of CPU time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        if outer:
            signal.setitimer(signal.ITIMER_PROF, max(1e-3, outer - (time.process_time() - began)))
