"""Weight sync by shared memory, for engines on the learner's host (Linux).

A segment is anonymous memory: the kernel frees it when the last process that maps it ends, however it ends, so nothing
leaks and nothing has to be unlinked. Other processes open it through /proc. A reader holds a shared lock while it holds
a tensor of the segment, the writer an exclusive lock while it writes; the kernel releases the locks of processes that
die.

The sender alternates between two segments, so receivers can still fetch the version before the newest. If a segment's
tensors are still held, the sender leaves it to its readers and makes a new one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import torch
from torch import Tensor

from drumroll.sample import Version
from drumroll.weights import AS_IS, Entry, Named, Packing, WeightManifest, WeightSyncError, WrongVersion, lend, unpack

SEGMENTS = 2
GROW = 64 << 20
HEAD = struct.Struct("<qq")  # a segment begins with its token and the version it holds
UNWRITTEN = -1


class _Segment:
    """Shared memory as the writer sees it."""

    def __init__(self, run: str) -> None:
        self.token = secrets.randbits(63)
        self.fd = os.memfd_create(f"drumroll-{run}"[:200])
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self.map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def mark(self, version: Version) -> None:
        HEAD.pack_into(self.map, 0, self.token, version)

    def reserve(self, size: int) -> None:
        """Grow the segment to at least `size` bytes."""
        if size > len(self.map):
            del self.data
            self.map.resize(max(size, len(self.map) + min(len(self.map), GROW)))
            self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def lock(self) -> bool:
        """Lock out readers; return False if a reader holds the segment."""
        with suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        del self.data
        self.map.close()
        os.close(self.fd)


class SharedSender:
    """Writes each version once, for any number of readers."""

    def __init__(self, run: str, packing: Packing = AS_IS) -> None:
        self.run = run
        self.packing = packing
        self._segments: list[_Segment] = []

    def send(self, version: Version, tensors: Named, attempt: int = 0) -> WeightManifest:
        segment, entries, end = self._turn(), list[Entry](), HEAD.size
        segment.mark(UNWRITTEN)  # so that nothing can be read if this process dies, or the tensors raise, half-way
        try:
            for name, tensor in tensors:
                entry = self.packing.place(name, tensor, end)
                end = entry.end
                segment.reserve(end)
                entries.append(self.packing.write(segment.data, entry, tensor))
            segment.mark(version)
        finally:
            fcntl.flock(segment.fd, fcntl.LOCK_UN)
        return WeightManifest(version, f"/proc/{os.getpid()}/fd/{segment.fd}", segment.token, attempt, tuple(entries))

    def _turn(self) -> _Segment:
        """Return the segment to write next, locked."""
        segment = self._segments.pop(0) if len(self._segments) == SEGMENTS else _Segment(self.run)
        if not segment.lock():
            segment.close()
            segment = _Segment(self.run)
            segment.lock()
        self._segments.append(segment)
        return segment

    def wait(self) -> None: ...

    def close(self) -> None:
        while self._segments:
            self._segments.pop().close()


class SharedReceiver:
    """Maps segments read-only: writing into a received tensor crashes the process."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}  # kept, since mapping again costs half a copy

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        return unpack(self._open(manifest), manifest.entries)

    def _open(self, manifest: WeightManifest) -> Tensor:
        size = max([HEAD.size, *(entry.end for entry in manifest.entries)])
        with ExitStack() as lock:
            try:
                file = lock.enter_context(open(manifest.where, "rb"))
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mapped = self._map(manifest, size)
            except BlockingIOError:
                raise WrongVersion(f"Version {manifest.version} is being overwritten by a newer one: fetch that.") from None
            except (OSError, ValueError) as error:
                raise WeightSyncError(
                    f"Version {manifest.version} is gone: its sender was closed or has died ({error})."
                ) from None
            token, found = HEAD.unpack_from(mapped)
            if (token, found) != (manifest.token, manifest.version):
                raise WrongVersion(
                    f"The manifest announces version {manifest.version}, its memory holds {found}: fetch the newest."
                )
            unlock = lock.pop_all()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        return lend(address, size, lambda: (unlock.close(), mapped))

    def _map(self, manifest: WeightManifest, size: int) -> mmap.mmap:
        """Return the segment's memory.

        Opens the file a second time, because a map keeps its file open, and with it the lock.
        """
        mapped = self._maps.get(manifest.token)
        if mapped is None or len(mapped) < size:
            with open(manifest.where, "rb") as file:
                mapped = self._maps[manifest.token] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            while len(self._maps) > SEGMENTS:
                del self._maps[next(iter(self._maps))]
        return mapped

    def close(self) -> None:
        self._maps.clear()
