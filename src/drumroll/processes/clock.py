"""Measures the run time of processes: wall time minus the time spent waiting for a CPU core.

Other load on the machine does not change it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

LONGEST = 1.0
"""The most seconds that one interval between two `look` calls can add.

If the reader itself is delayed, the processes are not charged for it.
"""


class RunTime:
    """A run-time clock over a set of processes that may start and end.

    Call `look` several times a second; each call costs a few small reads.

    The kernel records for each thread how long it ran and how long it waited for a core (`schedstat`). On systems
    without `schedstat` this clock measures wall time. A thread that waits while another thread of the same processes
    runs does not stop the clock, so a program gains nothing by starting more threads than there are cores.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self.seconds = 0.0
        self._pids = pids
        self._at, self._seen = time.monotonic(), self._read()
        self._slack = 0.0

    def look(self) -> float:
        """Update the clock and return the run time in seconds since it was created."""
        now, seen = time.monotonic(), self._read()
        before = [(new, self._seen.get(task, (0.0, 0.0))) for task, new in seen.items()]
        ran = sum(max(0.0, new[0] - old[0]) for new, old in before)
        waited = sum(max(0.0, new[1] - old[1]) for new, old in before)
        passed = now - self._at
        least, rest = min(passed, ran), passed - waited
        self.seconds += min(max(least, rest), LONGEST)
        # The kernel reports a wait only when it ends. The part before the previous `look` was charged then; give it
        # back now.
        self.seconds -= min(self._slack, max(0.0, least - rest))
        self._slack = min(max(0.0, rest - least), LONGEST) + (0.0 if ran else self._slack)
        self._at, self._seen = now, seen
        return self.seconds

    def _read(self) -> dict[int, tuple[float, float]]:
        """Map each thread id to the seconds it ran and the seconds it waited for a core."""
        found = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/task/{task}/schedstat") as file:
                        ran, waited, _ = map(int, file.read().split())
                        found[int(task)] = (ran / 1e9, waited / 1e9)
        return found


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its living descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found
