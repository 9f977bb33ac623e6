"""Run time: the wall time of some processes, less the time that they waited for a core. Other work on the machine does not move it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

LONGEST = 1.0
"""Seconds that one interval between two looks counts at most: a reader who was delayed must not charge others for it."""


class RunTime:
    """A clock of processes that may come and go. Call `look` several times a second; it costs a few small reads.

    The kernel counts, for each thread, how long it ran and how long it waited for a core (`schedstat`). Where it does not,
    this is wall time. Threads that wait while others of the same processes run do not stop the clock, so that
    a program gains nothing by starting more of them than there are cores.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self.seconds = 0.0
        self._pids = pids
        self._at, self._seen = time.monotonic(), self._read()
        self._slack = 0.0

    def look(self) -> float:
        """Seconds since the beginning."""
        now, seen = time.monotonic(), self._read()
        before = [(new, self._seen.get(task, (0.0, 0.0))) for task, new in seen.items()]
        ran = sum(max(0.0, new[0] - old[0]) for new, old in before)
        waited = sum(max(0.0, new[1] - old[1]) for new, old in before)
        passed = now - self._at
        least, rest = min(passed, ran), passed - waited
        self.seconds += min(max(least, rest), LONGEST)
        # The kernel counts a wait when it ends: its part before the last look was charged then, and is given back now.
        self.seconds -= min(self._slack, max(0.0, least - rest))
        self._slack = min(max(0.0, rest - least), LONGEST) + (0.0 if ran else self._slack)
        self._at, self._seen = now, seen
        return self.seconds

    def _read(self) -> dict[int, tuple[float, float]]:
        """Of each thread, how long it ran and how long it waited."""
        found = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{task}/schedstat") as file:
                        ran, waited, _ = map(int, file.read().split())
                        found[int(task)] = (ran / 1e9, waited / 1e9)
        return found


def family(pid: int) -> list[int]:
    """A process and all its living descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found
