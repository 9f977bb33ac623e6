"""Deadlines that other work on the machine does not move, so that a verdict never depends on load.

Pure computation is limited in CPU time. Whatever may sleep is limited in run time: wall time less the time spent waiting for a core.
Far behind either is a limit of wall time: whoever exceeds only that was not given the time, which is no verdict but a failure,
to be tried again.
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
"""Seconds between two looks at the clock."""


class CpuTimeExceeded(TimeoutError):
    """A pure computation used up its CPU time. It would do so again: it may be judged by that, and is not tried again."""


class MachineBusy(TimeoutError):
    """A process did not get the time that it may take. Another try may end otherwise."""


class RunTimeExceeded(TimeoutError):
    """Processes took longer than they may, waiting for a core aside."""


class _Struck(BaseException):
    """Raised by the timer's signal; no `except Exception` in a library stops it."""


@dataclass(frozen=True)
class Deadline:
    """How long a process may take to answer."""

    seconds: float
    cpu: bool = False
    """The process counts its own CPU time, by `cpu_limit`; here only the wall limit counts."""

    @property
    def wall(self) -> float:
        """The limit of wall time behind it, also for what the kernel ends a few seconds later."""
        return max(60.0, 20.0 * self.seconds)

    async def wait(self, answer: Coroutine[Any, Any, T], pid: int) -> T:
        """The answer of a process; `RunTimeExceeded` if it and its descendants take longer, `MachineBusy` past the wall limit."""
        task = asyncio.ensure_future(answer)
        clock = None if self.cpu else RunTime(lambda: family(pid))
        until, pause, late = time.monotonic() + self.wall, min(self.seconds, TICK), None
        try:
            while not (await asyncio.wait({task}, timeout=pause))[0]:
                if late is not None:
                    raise late
                spent = 0.0 if clock is None else clock.look()
                late = self._late(spent, time.monotonic() >= until)
                pause = TICK if late is not None else min(self.seconds - spent, TICK)  # an answer may lie in the pipe already
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
    """Raise `CpuTimeExceeded` once this process has used so much CPU time in the block. Main thread only; blocks may nest."""

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
