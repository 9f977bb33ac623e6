"""The first process in the box: forks a supervisor for each job, and removes everything that the run left behind.

It must never read a job or a reply: the next program could find them in its own memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import stat
import sys
import time
from typing import NoReturn

from .supervisor import supervise

READY, PLAIN, WITH_PYTEST = b"R", b"J", b"P"
PRELOADED = (
    "array bisect collections copy dataclasses datetime decimal enum fractions functools heapq io itertools json math operator "
    "queue random re statistics string tempfile threading types typing"
)
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
MOST_REMAINS = 2000


def prepare() -> tuple[int, int]:
    """Make this process unreadable to others of the same user, load modules, and take the pipes from 0 and 1."""
    prctl(PR_SET_DUMPABLE, 0)
    for name in PRELOADED.split():
        importlib.import_module(name)
    jobs, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    return jobs, replies


def prctl(option: int, value: int) -> None:
    """Set a property of this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def load(kind: bytes) -> None:
    """Load pytest if the job needs it, because it takes long to load. The zygote learns nothing else of a job."""
    if kind == WITH_PYTEST and "pytest" not in sys.modules:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.path.append("/pytest.zip" if os.path.exists("/pytest.zip") else "pytest.zip")
        importlib.import_module("pytest")


def main() -> NoReturn:
    """Serve jobs until the pipe closes. If a run cannot be wiped, the box ends."""
    jobs, replies = prepare()
    os.dup2(0, 2)
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(jobs, select.POLLIN)
    os.write(replies, READY)
    while poll.poll()[0][1] & select.POLLIN:
        load(os.read(jobs, 1))
        if (pid := os.fork()) == 0:
            _supervise_and_exit(jobs, replies)
        if os.waitpid(pid, 0)[1] != 0:
            os._exit(1)
        end_all()
        clean("/tmp")
        os.write(replies, READY)
    os._exit(0)


def _supervise_and_exit(jobs: int, replies: int) -> NoReturn:
    try:
        supervise(jobs, replies, frozenset((1, os.getppid())), contained=True)
        code = 0
    except BaseException:
        code = 1
    os._exit(code)


def end_all() -> None:
    """Kill all processes of the box except this one and the first, until none is left."""
    assert os.getpid() < 10, "the box has a process namespace of its own"
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(0.0002)


def clean(folder: str) -> None:
    """Remove everything below a folder; if there is too much, end the box."""
    os.chmod(folder, 0o700)
    left, folders = MOST_REMAINS, [folder]
    for path in folders:
        for entry in list(os.scandir(path)):
            left -= 1
            if left < 0:
                os._exit(1)
            if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                os.chmod(entry.path, 0o700)
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
    for path in reversed(folders[1:]):
        os.rmdir(path)
    os.chdir(folder)


def once() -> NoReturn:
    """Run a single job outside a box, where the program's processes are found by their parents. SIGTERM ends them too."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    jobs, replies = prepare()
    load(os.read(jobs, 1))
    try:
        supervise(jobs, replies, frozenset(), contained=False)
    finally:  # also if no process is left to take the reply
        _end_children()
    os._exit(0)


def _end_children() -> None:
    """Kill all descendants, until none is left."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.0002)


def _children() -> list[int]:
    """Return our children, and the orphans among our descendants."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found
