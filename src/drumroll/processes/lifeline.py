"""Ends the processes that this one starts when this one is gone, even by SIGKILL.

`guard` hands a process to the *guardian*, a small process beside this one, which kills it when this one ends. A process that leads
a process group takes the group with it: everything it started. The guardian runs no code of a user, so nothing can block it. A
parent-death signal (`PR_SET_PDEATHSIG`) does less: it follows the thread that started a process, and misses grandchildren.

`guarded` wraps the command of a program that another library starts.

This file also runs as a program, by its path: it imports the standard library only. Programs that end within seconds by
themselves (a compiler, a probe) need no guard.
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
"""Bytes of a process id on its way to the guardian."""
LOOK_SECONDS = 1.0
"""How often to look for the owner where the system cannot report the end of a process."""

_lock = threading.Lock()
_guardian: tuple[int, int] | None = None  # whose it is, and the pipe to it


def guard(pid: int) -> None:
    """Kill a process when this one ends, and the process group that it leads when either ends."""
    global _guardian
    with _lock:
        for _ in range(2):
            if _guardian is None or _guardian[0] != os.getpid():  # a forked process has its own
                _guardian = os.getpid(), _start_guardian()
            try:
                os.write(_guardian[1], pid.to_bytes(SIZE, "little"))
                return
            except BrokenPipeError:  # the guardian was killed: start another
                os.close(_guardian[1])
                _guardian = None


def guarded(command: Sequence[str]) -> list[str]:
    """A command that runs `command` and kills its process group, which must be its own, when this process ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _start_guardian() -> int:
    """Start the guardian; the pipe to it tells it of this process's end."""
    reader, writer = os.pipe()
    quiet = subprocess.DEVNULL
    try:  # in a session of its own: Ctrl-C is not meant for it
        subprocess.run(guarded([]), stdin=reader, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=True)
    finally:
        os.close(reader)
    return writer


# --- in the guardian's process ---


def _watch(poll: select.poll, pid: int) -> int | None:
    """Have a process's end reported; None where the system cannot. A process that is gone already raises."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # not Linux, a Python built without it, or a sandbox that refuses it
        return None
    poll.register(handle, select.POLLIN)
    return handle


def _be_guardian(owner: int) -> None:
    """Kill a process's group when it ends, and all processes and groups when the owner ends or closes the pipe."""
    if os.fork():
        os._exit(0)  # as nobody's child: a runtime that ends its workers' children must not end it before them
    poll = select.poll()
    with suppress(ProcessLookupError):  # the pipe tells that too
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
        for pid in filter(_gone, list(unwatched)):  # before its number is another's
            unwatched.discard(pid)
            _kill_group(pid)
    for pid in (*watched.values(), *unwatched):
        _kill_group(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _read(poll: select.poll, watched: dict[int, int], unwatched: set[int]) -> bool:
    """Take all process ids from the pipe; true when it is closed."""
    with suppress(BlockingIOError):
        while said := os.read(0, SIZE):
            pid = int.from_bytes(said, "little")
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
    """Run a program until it ends, or kill the group when the owner does."""
    try:
        program = subprocess.Popen(command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the group: the program decides
    for fd in (0, 1):
        os.close(fd)  # the program's own
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
