"""Weight sync by broadcast, for engines on any host: gloo in main memory, their own collectives between accelerators.

Store and gloo listen on one address.

The process group is separate from torch's default group. The sender packs small tensors into buckets and sends a tensor
as large as a bucket from its own memory. It packs a bucket while earlier ones are in flight, and a receiver reads a
bucket while later ones are. A header describes the next bucket; it travels through the group's store, so neither side
needs to know the tensors in advance.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drumroll.processes import accelerator
from drumroll.processes.rendezvous import (
    LOOPBACK,
    device_group,
    find_store,
    gloo_group,
    gloo_options,
    meeting,
    open_store,
    steer_collectives,
)
from drumroll.sample import Version
from drumroll.weights import ALIGN, AS_IS, Entry, Named, Packing, WeightManifest, WeightSyncError, WrongVersion, lend, unpack

BUCKET = 64 << 20
IN_FLIGHT = 3
SMALL = 1 << 20
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address where the sender and its receivers meet, and their total number. With port 0 the sender picks a port."""

    host: str
    port: int
    size: int
    device: str = "cpu"
    seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class _Header:
    """Describes the next bucket. A header without entries ends the transfer; `error` says why the sender gave up."""

    version: Version
    entries: tuple[Entry, ...] = ()
    size: int = 0
    error: str = ""

    def encode(self) -> str:
        """Encode as JSON, never pickle: anyone who can reach the store can write to it."""
        entries = [[e.name, str(e.dtype).removeprefix("torch."), e.shape, e.begin, e.end, e.checksum] for e in self.entries]
        return json.dumps([self.version, entries, self.size, self.error])

    @classmethod
    def decode(cls, text: bytes) -> _Header:
        version, entries, size, error = json.loads(text)
        return cls(version, tuple(Entry(n, DTYPES[t], tuple(s), b, e, c) for n, t, s, b, e, c in entries), size, error)


class _Link:
    """One process's side of the group; rank 0 is the sender."""

    def __init__(self, meeting: Meeting, rank: int, address: str) -> None:
        where = meeting.host, meeting.port, meeting.seconds
        self.timeout = timedelta(seconds=meeting.seconds)
        self.store = open_store(*where) if rank == 0 else find_store(*where, address)
        self.meeting = replace(meeting, port=self.store.port)
        self.rank, self.address = rank, address
        self.attempts = 0
        self._idle: dict[int, Tensor] = {}

    @cached_property
    def group(self) -> Any:
        """The process group, made with the first bucket, because making it waits until all ranks have joined."""
        store, size = dist.PrefixStore("group", self.store), self.meeting.size
        with meeting(store, self.rank, size, self.address, self.meeting.seconds):
            if self.meeting.device == "cpu":
                options = gloo_options(self.meeting.host, self.address, self.meeting.seconds)
                return gloo_group(store, self.rank, size, options)
            accelerator.select(self.meeting.device)
            steer_collectives(self.meeting.device, self.address)
            return device_group(self.meeting.device, store, self.rank, size, self.timeout)

    def send(self, attempt: int, version: Version, buckets: Iterable[tuple[list[Entry], Tensor]]) -> None:
        """Broadcast a version in a numbered attempt; returns when all have taken it."""
        taken = [f"{attempt}/taken/{rank}" for rank in range(1, self.meeting.size)]
        posted, works = list[str](), deque[Any]()

        def post(header: _Header) -> None:
            posted.append(f"{attempt}/{len(posted)}")
            self.store.set(posted[-1], header.encode())

        try:
            for entries, data in buckets:
                post(_Header(version, tuple(entries), len(data)))
                works.append(self.group.broadcast(data.contiguous(), 0))
                self._land(works, IN_FLIGHT - 1)
            post(_Header(version))
        except BaseException as error:
            post(_Header(version, error=f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._land(works)
        self.store.wait(taken, self.timeout)
        for key in (*posted, *taken):
            self.store.delete_key(key)

    def _land(self, works: deque[Any], flying: int = 0) -> None:
        """Wait until at most `flying` broadcasts are in flight.

        If one fails, drop the group, so that the other ranks need not wait.
        """
        try:
            while len(works) > flying:
                works.popleft().wait()
        except RuntimeError:
            works.clear()
            del self.group
            raise

    def take(self, attempt: int) -> Iterator[tuple[_Header, Tensor]]:
        """The buckets of an attempt, each given out while the next are on their way; the last one is empty."""
        flying = deque[tuple[Any, _Header, Tensor]]()
        for index in count():
            header = _Header.decode(self.store.get(f"{attempt}/{index}"))
            data = self.buffer(header.size)
            if header.entries:
                flying.append((self.group.broadcast(data, 0), header, data))
            while len(flying) >= IN_FLIGHT or (flying and not header.entries):
                work, *_ = bucket = flying.popleft()
                work.wait()
                yield bucket[1:]
            if header.error:
                raise WeightSyncError(f"The sender of version {header.version} failed: {header.error}")
            if not header.entries:
                self.store.set(f"{attempt}/taken/{self.rank}", "")
                yield header, data
                return

    def buffer(self, size: int) -> Tensor:
        """Allocate bytes on the device. Main memory is reused once nothing holds it: fresh pages cost more than a copy."""
        if self.meeting.device != "cpu" or not size:
            return torch.empty(size, dtype=torch.uint8, device=self.meeting.device)
        for memory in sorted(self._idle.values(), key=len):
            if len(memory) >= size and self._idle.pop(memory.data_ptr(), None) is not None:
                break
        else:
            memory = torch.empty(max(size, BUCKET), dtype=torch.uint8)
        return lend(memory.data_ptr(), size, lambda: self._retire(memory))

    def _retire(self, memory: Tensor) -> None:
        """Keep a buffer for reuse. Runs on whichever thread drops the last tensor, so each step must be safe on its own."""
        self._idle[memory.data_ptr()] = memory
        if len(self._idle) > IN_FLIGHT + 1:
            smallest = min(list(self._idle.values()), key=len)
            self._idle.pop(smallest.data_ptr(), None)


class _Contiguous:
    """Tensors that are next to each other in memory, sent as one bucket without a copy."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.begin = int(tensor.storage_offset()) * tensor.itemsize
        self.entries = [Entry(name, tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes)]

    def add(self, name: str, tensor: Tensor, limit: int) -> bool:
        """Append the tensor if it is the next neighbour and fits in the bucket; return whether it was appended."""
        begin = int(tensor.storage_offset()) * tensor.itemsize - self.begin
        end = begin + tensor.nbytes
        near = 0 <= begin - self.entries[-1].end < 2 * ALIGN and end <= limit
        if not near or tensor.untyped_storage().data_ptr() != self.storage.data_ptr():
            return False
        self.entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), begin, end))
        return True

    def sealed(self, packing: Packing) -> tuple[list[Entry], Tensor]:
        """Return the bucket's entries, with checksums if enabled, and its bytes."""
        size = self.entries[-1].end
        whole: Any = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        data = whole.set_(self.storage, self.begin, (size,))
        return [packing.seal(data, entry) for entry in self.entries], data


class BroadcastSender:
    """Sends from a background thread, so that the caller can pass the manifest on and start the receivers meanwhile."""

    def __init__(self, meeting: Meeting, packing: Packing = AS_IS, bucket: int = BUCKET, address: str = LOOPBACK) -> None:
        self._link = _Link(meeting, 0, address)
        self.meeting = self._link.meeting
        self.packing = packing
        self.bucket = bucket
        self._sending: Future[None] | None = None

    def send(self, version: Version, tensors: Named, attempt: int = 0) -> WeightManifest:
        self.wait()
        self._sending, self._link.attempts = Future(), attempt or self._link.attempts + 1
        work = (self._link.attempts, version, iter(tensors), self._sending)
        threading.Thread(target=self._run, args=work, name="weight-sync", daemon=True).start()
        return WeightManifest(version, f"{self.meeting.host}:{self.meeting.port}", attempt=self._link.attempts)

    def wait(self) -> None:
        sending, self._sending = self._sending, None
        try:
            if sending is not None:
                sending.result()
        except RuntimeError as error:  # raised by torch: gloo, collectives of a device or the store
            raise WeightSyncError(f"The weights did not reach all engines; close this sender and meet anew: {error}") from error

    def _run(self, attempt: int, version: Version, tensors: Iterator[tuple[str, Tensor]], done: Future[None]) -> None:
        try:
            with torch.no_grad():
                self._link.send(attempt, version, self._buckets(tensors))
            done.set_result(None)
        except BaseException as error:
            with suppress(Exception):  # other ranks of a sharded learner gather the rest with this one
                deque(tensors, maxlen=0)
            done.set_exception(error)

    def _buckets(self, tensors: Named) -> Iterator[tuple[list[Entry], Tensor]]:
        """Yield buckets: neighbours in memory as they are, isolated tensors and those to convert packed into a buffer."""
        data, entries, end = torch.empty(0), list[Entry](), 0
        adjacent: _Contiguous | None = None
        for name, tensor in tensors:
            if self._ready(tensor, self.packing.place(name, tensor, 0)):
                if entries:
                    yield entries, data[: max(end, 1)]
                    entries, end = [], 0
                if adjacent is None or not adjacent.add(name, tensor, self.bucket):
                    if adjacent is not None:
                        yield adjacent.sealed(self.packing)
                    adjacent = _Contiguous(name, tensor)
                continue
            if adjacent is not None:
                yield adjacent.sealed(self.packing)
                adjacent = None
            entry = self.packing.place(name, tensor, end)
            if entries and entry.end > self.bucket:
                yield entries, data[: max(end, 1)]
                entry, entries = self.packing.place(name, tensor, 0), []
            if not entries:
                data = self._link.buffer(max(self.bucket, entry.end))
            entries.append(self.packing.write(data, entry, tensor))
            end = entry.end
        if entries:
            yield entries, data[: max(end, 1)]
        if adjacent is not None:
            yield adjacent.sealed(self.packing)

    def _ready(self, tensor: Tensor, entry: Entry) -> bool:
        """Return whether to send the tensor from its own memory, which pays only for large storages."""
        if not tensor.numel() or tensor.untyped_storage().nbytes() < min(self.bucket, SMALL):
            return False
        return tensor.is_contiguous() and tensor.dtype == entry.dtype and tensor.device == torch.device(self.meeting.device)

    def close(self) -> None:
        del self._link


class BroadcastReceiver:
    """Takes part in every broadcast of its group, with a rank of 1 or higher."""

    def __init__(self, meeting: Meeting, rank: int, address: str = LOOPBACK) -> None:
        self._link = _Link(meeting, rank, address)

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        buckets = self._link.take(manifest.attempt)
        try:
            for header, data in buckets:
                if header.version != manifest.version:
                    raise WrongVersion(f"The manifest announces version {manifest.version}, the sender sends {header.version}.")
                yield from unpack(data, header.entries)
        except RuntimeError as error:  # raised by torch: gloo, collectives of a device or the store
            raise WeightSyncError(f"Version {manifest.version} did not arrive: {error}") from error
        finally:
            for _ in buckets:  # a caller that stops early still takes the rest, so that the other ranks need not wait
                pass

    def close(self) -> None:
        del self._link
