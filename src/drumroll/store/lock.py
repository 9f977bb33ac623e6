"""Locks a run directory: one process trains in it at a time; readers need no lock.

The operating system holds the lock (`flock`) and releases it when its process ends, however it ends. The text of the lock
file tells people who holds it and decides nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from drumroll.errors import StoreError
from drumroll.runfiles.durable import explained, make_folder

LOCK = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_held: set[int] = set()


def _let_go() -> None:
    """Close the parent's locks in a forked process, which would otherwise hold them after the parent has ended."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(path: Path) -> Generator[bool]:
    """Lock a run directory within the block; create it if it is missing. Yield False on a file system without locks.

    Removes a directory that it created and that is still empty at the end.
    """
    created, file = not path.exists(), path / LOCK
    make_folder(path)
    with explained(file):
        handle, exclusive = _acquire(file)
    _held.add(handle)
    try:
        yield exclusive
    finally:
        file.unlink(missing_ok=True)  # before the lock is released: a waiting process then opens the file again
        _held.discard(handle)
        os.close(handle)
        if created:
            with suppress(OSError):
                path.rmdir()


def in_use(path: Path) -> bool:
    """Whether a process trains in a run directory, as far as its file system can tell."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _acquire(file: Path) -> tuple[int, bool]:
    tries = 0
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        exclusive = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(handle, 4096)
            os.close(handle)
            if (tries := tries + 1) < 3:  # `in_use` holds the lock for a moment
                time.sleep(0.02)
                continue
            raise StoreError(f"{file.parent} is in use by {_holder(text)}; wait until it ends, or stop it first.") from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(handle)
                raise
            exclusive = False
        with suppress(FileNotFoundError):  # its last holder may have removed the file since we opened it
            if os.path.samestat(os.fstat(handle), file.stat()):
                os.truncate(handle, 0)
                started = datetime.now().astimezone().isoformat(timespec="seconds")
                os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode())
                return handle, exclusive
        os.close(handle)


def _holder(text: bytes) -> str:
    try:
        found = json.loads(text)
        return f"process {found['pid']} on {found['host']} since {found['started']}"
    except (ValueError, KeyError, TypeError):  # it has not written its name yet
        return "another process"
