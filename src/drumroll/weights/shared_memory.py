"""Weight sync by shared memory, for engines on the learner's host (Linux): all receivers read the sender's buckets in place.

A slot is anonymous memory: the kernel frees it when the last process that maps it ends, however it ends, so nothing
leaks and nothing has to be unlinked. Other processes open it through /proc. The sender overwrites a slot when every
receiver has said that it has read it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from drumroll.processes.rendezvous import LOOPBACK
from drumroll.weights import AS_IS, BUCKET, Meeting, Packing, WeightSyncError
from drumroll.weights.stream import KEPT, SLOTS, Channel, Header, Link, StreamReceiver, StreamSender


class _Slot:
    """A bucket of shared memory as the sender sees it."""

    def __init__(self, run: str, size: int) -> None:
        self.fd = os.memfd_create(f"drumroll-{run}"[:200])
        os.ftruncate(self.fd, size)
        self.where = f"/proc/{os.getpid()}/fd/{self.fd}:{secrets.token_hex(8)}"  # descriptors are numbered anew
        self.data = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    def close(self) -> None:
        del self.data
        os.close(self.fd)


class _SharedMemory(Channel):
    def __init__(self, link: Link, run: str = "", bucket: int = BUCKET) -> None:
        super().__init__(link)
        self.run, self.bucket = run, bucket
        self._slots: dict[int, _Slot] = {}
        self._unread = deque[str]()
        self._maps: dict[str, mmap.mmap] = {}  # kept, since mapping again costs half a copy

    # --- the sender's side ---

    @override
    def room(self, index: int, size: int) -> Tensor:
        self.land(SLOTS - 1)
        slot = self._slots.get(index % SLOTS)
        if slot is None or len(slot.data) < size:
            if slot is not None:
                slot.close()
            slot = self._slots[index % SLOTS] = _Slot(self.run, size)
        self.count(len(slot.data) for slot in self._slots.values())
        return slot.data

    @override
    def where(self, index: int) -> str:
        return self._slots[index % SLOTS].where

    @override
    def send(self, attempt: int, index: int, data: Tensor) -> None:
        self._unread.append(f"{attempt}/{index}/read")

    @override
    def land(self, flying: int = 0) -> None:
        try:
            while len(self._unread) > flying:
                self.link.await_receivers(self._unread.popleft())
        except BaseException:
            self._unread.clear()
            raise

    # --- a receiver's side ---

    @override
    def receive(self, attempt: int, headers: Iterator[Header]) -> Iterator[tuple[Header, Tensor]]:
        for index, header in enumerate(headers):
            yield header, self._open(header)
            self.link.store.set(f"{attempt}/{index}/read/{self.link.rank}", "")

    def _open(self, header: Header) -> Tensor:
        mapped = self._maps.get(header.where)
        if mapped is None:
            try:
                with open(header.where.rpartition(":")[0], "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise WeightSyncError(
                    f"Version {header.version} is gone: its sender was closed or has died ({error})."
                ) from None
            while len(self._maps) >= SLOTS:
                del self._maps[next(iter(self._maps))]
            self._maps[header.where] = mapped
        self.count(map(len, self._maps.values()))
        return _bytes(mapped, header.size)

    # --- both ---

    @override
    def trim(self) -> None:
        self._maps = {where: mapped for where, mapped in self._maps.items() if len(mapped) <= KEPT * self.bucket}
        for index in [index for index, slot in self._slots.items() if len(slot.data) > KEPT * self.bucket]:
            self._slots.pop(index).close()

    @override
    def close(self) -> None:
        self._maps.clear()
        while self._slots:
            self._slots.popitem()[1].close()


def _bytes(mapped: mmap.mmap, size: int) -> Tensor:
    """Read-only memory as a tensor, which keeps it mapped; torch would warn of a buffer that cannot be written."""
    held: Any = (ctypes.c_byte * size).from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    held.mapped = mapped
    return torch.frombuffer(held, dtype=torch.uint8)


class SharedSender(StreamSender):
    """Writes each bucket once, for any number of readers."""

    def __init__(self, meeting: Meeting, run: str, packing: Packing = AS_IS, bucket: int = BUCKET) -> None:
        link = Link(meeting, 0, LOOPBACK)
        super().__init__(link, _SharedMemory(link, run, bucket), packing, bucket)


class SharedReceiver(StreamReceiver):
    """Maps buckets read-only: writing into a received tensor crashes the process."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        link = Link(meeting, rank, LOOPBACK)
        super().__init__(link, _SharedMemory(link))
