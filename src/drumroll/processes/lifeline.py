"""Kills the processes that this process starts when this process ends, even by SIGKILL.

`guard` registers a process with the *guardian*, a small process that outlives this one just long enough to kill it. If
the registered process leads a process group, the guardian kills the whole group, which includes everything the process
started. The guardian runs no user code, so nothing can block it. A parent-death signal (`PR_SET_PDEATHSIG`) is weaker:
it follows the thread that started a process, and misses grandchildren.

`guarded` wraps the command of a program that another library starts.

This file also runs as a program, by its path, so it imports only the standard library. Programs that end by themselves
within seconds (a compiler, a probe) need no guard.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

SIZE = 8
"""Bytes that encode a process id in the pipe to the guardian."""
LOOK_SECONDS = 1.0
"""Seconds between checks of the owner on systems that cannot report the end of a process."""

_lock = threading.Lock()
_guardian: tuple[int, int] | None = None  # the id of the process that started the guardian, and the write end of its pipe


def guard(pid: int) -> None:
    """Kill process `pid` when this process ends. If it leads a process group, kill the group when either process ends."""
    global _guardian
    with _lock:
        for _ in range(2):
            if _guardian is None or _guardian[0] != os.getpid():  # a forked process needs its own guardian
                _guardian = os.getpid(), _start_guardian()
            try:
                os.write(_guardian[1], pid.to_bytes(SIZE, "little"))
                return
            except BrokenPipeError:  # the guardian was killed: start a new one
                os.close(_guardian[1])
                _guardian = None


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and kills its process group when this process ends.

    The command must lead its own group.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _start_guardian() -> int:
    """Start the guardian and return the write end of its pipe, which closes when this process ends."""
    reader, writer = os.pipe()
    quiet = subprocess.DEVNULL
    try:  # in a new session, so that Ctrl-C does not reach it
        subprocess.run(guarded([]), stdin=reader, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=True)
    finally:
        os.close(reader)
    return writer


# --- in the guardian's process ---


def _watch(poll: select.poll, pid: int) -> int | None:
    """Register for the end of a process and return its handle, or None if the system cannot report it.

    Raises ProcessLookupError if it is gone.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # not Linux, a Python built without it, or a sandbox that refuses it
        return None
    poll.register(handle, select.POLLIN)
    return handle


def _be_guardian(owner: int) -> None:
    """Kill a process's group when that process ends, and all processes and groups when the owner ends or closes the pipe."""
    if os.fork():
        os._exit(0)  # detach from the owner: a runtime that kills its workers' children must not kill the guardian first
    poll = select.poll()
    with suppress(ProcessLookupError):  # the closed pipe reports that too
        _watch(poll, owner)
    poll.register(0, select.POLLIN)
    os.set_blocking(0, False)
    watched: dict[int, int] = {}
    unwatched: set[int] = set()
    ended = False
    while not ended:
        for fd, _ in poll.poll(1000 * LOOK_SECONDS if unwatched else None):
            if fd in watched:
                poll.unregister(fd)
                os.close(fd)
                _kill_group(watched.pop(fd))
            else:
                ended |= _read(poll, watched, unwatched) or fd != 0
        for pid in filter(_gone, list(unwatched)):  # before the system reuses the id
            unwatched.discard(pid)
            _kill_group(pid)
    for pid in (*watched.values(), *unwatched):
        _kill_group(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _read(poll: select.poll, watched: dict[int, int], unwatched: set[int]) -> bool:
    """Read all process ids from the pipe; return True when the pipe is closed."""
    with suppress(BlockingIOError):
        while data := os.read(0, SIZE):
            pid = int.from_bytes(data, "little")
            try:
                handle = _watch(poll, pid)
            except ProcessLookupError:
                _kill_group(pid)
                continue
            if handle is None:
                unwatched.add(pid)
            else:
                watched[handle] = pid
        return True
    return False


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _run(owner: int, command: Sequence[str]) -> int:
    """Run a program until it ends; kill the process group if the owner ends first."""
    try:
        program = subprocess.Popen(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these go to the whole group; the program decides how to react
    for fd in (0, 1):
        os.close(fd)  # only the program uses these
    poll = select.poll()
    handles = [_watch(poll, program.pid)]
    with suppress(ProcessLookupError):
        handles.append(_watch(poll, owner))
    while program.poll() is None:
        if os.getppid() != owner:
            os.killpg(0, signal.SIGKILL)
        poll.poll(1000 * LOOK_SECONDS if None in handles else None)
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(_run(int(sys.argv[1]), sys.argv[2:]))
    _be_guardian(int(sys.argv[1]))
