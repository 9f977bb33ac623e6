"""Supervises one run: reads the job, starts the program and, for tests, the examiner, enforces limits, and reports."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from drumroll.processes.clock import RunTime, family

from . import examiner, program
from .link import receive, send

TICK = 0.05
"""Seconds between checks of time, memory and files."""
MOST_FILES = 10_000
TAIL = 16_000
BEGUN = b"B"


def supervise(jobs: int, replies: int, own: frozenset[int], *, contained: bool) -> list[int]:
    """Run one job from the pipe, write the reply, and return the started processes. `own` are ours, not the program's."""
    job = receive(jobs)
    job["limits"]["contained"] = contained
    exam = job["mode"] == "exam"
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    asked, ask_end = os.pipe()
    answer_end, answered = os.pipe()
    given = tempfile.TemporaryFile(dir="/tmp")  # noqa: SIM115  closed once the program has it
    given.write(job.pop("stdin").encode(errors="replace"))
    given.seek(0)
    os.write(replies, BEGUN)
    pids = [_fork(program.be, (job,), (given.fileno(), out_end, err_end, *((asked, answered) if exam else ())))]
    private = receive(jobs)  # only now, so that the program has no copy of it
    verdicts, verdict_end = os.pipe()
    said, said_end = os.pipe()  # a separate pipe: the program could read along on its own
    if exam:
        null = os.open(os.devnull, os.O_RDONLY)
        ends = (null, said_end, said_end, answer_end, ask_end, verdict_end)
        pids.append(_fork(examiner.be, (job["limits"], private), ends))
    for fd in (out_end, err_end, asked, ask_end, answer_end, answered, verdict_end, said_end):
        os.close(fd)
    given.close()
    own |= {os.getpid()}
    watch = Watch(job["limits"], pids, (said, out, err), verdicts if exam else None, own)
    send(replies, {"nonce": private["nonce"], **watch.run()})
    return pids


def _fork(be: Callable[..., NoReturn], arguments: Sequence[Any], fds: Sequence[int]) -> int:
    """Fork a child whose descriptors 0, 1, 2, ... are these, and which has no others."""
    sys.stdout.flush()
    if (pid := os.fork()) != 0:
        return pid
    try:
        for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in fds]):
            os.dup2(fd, place)
        os.closerange(len(fds), 1024)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        be(*arguments)
    finally:
        os._exit(1)


class Watch:
    """Reads the program's output until it ends or exceeds a limit."""

    def __init__(
        self, limits: dict[str, Any], pids: list[int], texts: tuple[int, int, int], verdicts: int | None, own: frozenset[int]
    ) -> None:
        self.limits, self.own = limits, own
        self.pid, *self.examiner = pids
        self.texts, self.verdicts = texts, verdicts
        self.read: dict[int, bytearray] = {fd: bytearray() for fd in (*texts, *([] if verdicts is None else [verdicts]))}
        self.printed = 0
        self.base = _resident(os.getpid())
        self.clock = RunTime(self._pids)
        self.parent = os.getppid()

    def run(self) -> dict[str, Any]:
        """Watch the run and return the report."""
        ended = os.pidfd_open(self.pid)
        why = self._wait(ended if self.verdicts is None else None)
        seconds = self.clock.look()
        if why == "ended":
            self._drain()
            if self.printed > self.limits["output_kb"] << 10:
                why = "output"
            elif self.verdicts is not None:
                self._linger(ended)
        said, out, err = self.texts
        return {
            "why": why,
            "exit": self._exit(),
            "seconds": round(seconds, 6),
            "stdout": (self.read[said] + self.read[out]).decode(errors="replace"),
            "stderr": self.read[err][-TAIL:].decode(errors="replace"),
            "verdicts": [] if self.verdicts is None else _messages(self.read[self.verdicts]),
        }

    def _wait(self, ended: int | None) -> str:
        poll = select.poll()
        for fd in (*self.read, *([] if ended is None else [ended])):
            poll.register(fd, select.POLLIN)
        look = time.monotonic()
        while True:
            for fd, _ in poll.poll(1000 * max(0.0, look - time.monotonic())):  # before the limits: it may have ended in time
                if fd == ended:
                    return "ended"
                if not self._take(fd):
                    poll.unregister(fd)
                    if fd == self.verdicts:
                        return "ended"
            if self.printed > self.limits["output_kb"] << 10:
                return "output"
            if time.monotonic() >= look:
                if os.getppid() != self.parent:
                    return "orphaned"
                left = self.limits["seconds"] - self.clock.look()
                if left <= 0:
                    return "timeout"
                if self._memory() > self.limits["memory_mb"] << 20 or self._files() > MOST_FILES:
                    return "memory"
                look = time.monotonic() + min(TICK, left)

    def _take(self, fd: int) -> bool:
        data = os.read(fd, 1 << 16)
        kept = self.read[fd]
        kept += data
        if fd == self.texts[2]:
            del kept[:-TAIL]
        if fd != self.verdicts:
            self.printed += len(data)
        return bool(data)

    def _drain(self) -> None:
        """Read what is left in the pipes, without waiting for a process that keeps printing."""
        for fd in self.texts:
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):
                while self.printed <= self.limits["output_kb"] << 10 and self._take(fd):
                    pass

    def _linger(self, ended: int) -> None:
        """If the program's end ended the tests, wait to learn how it ended."""
        assert self.verdicts is not None
        found = _messages(self.read[self.verdicts])
        if not found or found[-1].get("why") == examiner.PROGRAM_ENDED:
            until = self.clock.look() + 2.0
            while self.clock.look() < until and not select.select([ended], [], [], TICK)[0]:
                pass

    def _exit(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _pids(self) -> set[int]:
        """Return all processes of the program and of its examiner."""
        if self.limits["contained"]:
            return {int(name) for name in os.listdir("/proc") if name.isdigit()} - self.own
        return set(family(os.getpid())) - self.own

    def _memory(self) -> int:
        """Return the memory of all processes of the program in bytes, beyond the memory shared at its start."""
        return sum(max(0, _resident(pid) - self.base) for pid in self._pids().difference(self.examiner))

    def _files(self) -> int:
        if not self.limits["contained"]:
            return 0
        found = os.statvfs("/tmp")
        return found.f_files - found.f_ffree


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _messages(data: bytearray) -> list[dict[str, Any]]:
    """Return the complete messages in a buffer."""
    found, place = [], 0
    while place + 4 <= len(data):
        end = place + 4 + struct.unpack_from("<I", data, place)[0]
        if end > len(data):
            break
        found.append(json.loads(data[place + 4 : end]))
        place = end
    return found
