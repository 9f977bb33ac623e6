"""The control plane of weight sync: which bucket comes next, in which attempt, and why none comes any more.

A header describes each bucket. It travels through a store that the sender's process opens, so neither side needs to know
the tensors in advance, and a dead sender is noticed at once. How the bytes of a bucket travel is the transport's own: a
`Channel`.
"""

from __future__ import annotations

import json
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from drumroll.processes.rendezvous import LOOPBACK, find_store, open_store
from drumroll.sample import Version
from drumroll.weights import (
    AS_IS,
    BUCKET,
    Entry,
    Meeting,
    Named,
    Packing,
    WeightManifest,
    WeightSyncError,
    WrongVersion,
    exhausted,
    unpack,
)

SLOTS = 2
"""Buckets of memory on each side: one is packed or read while the other travels."""
KEPT = 8
"""Main memory of up to so many buckets is kept for the next version: fresh pages cost more than a copy."""
LOOK = 8
"""Milliseconds at most between two looks for the receivers' answers."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the next bucket, and where it lies. One without entries ends the version; `error` says why it broke off."""

    version: Version
    entries: tuple[Entry, ...] = ()
    size: int = 0
    where: str = ""
    error: str = ""

    def encode(self) -> str:
        """Encode as JSON, never pickle: anyone who can reach the store can write to it."""
        entries = [[e.name, str(e.dtype).removeprefix("torch."), e.shape, e.begin, e.end, e.checksum] for e in self.entries]
        return json.dumps([self.version, entries, self.size, self.where, self.error])

    @classmethod
    def decode(cls, text: bytes) -> Header:
        """Decode what `encode` wrote."""
        version, entries, size, where, error = json.loads(text)
        return cls(version, tuple(Entry(n, DTYPES[t], tuple(s), b, e, c) for n, t, s, b, e, c in entries), size, where, error)


class Link:
    """One process's connection to the store; rank 0 is the sender."""

    def __init__(self, meeting: Meeting, rank: int, address: str) -> None:
        where = meeting.host, meeting.port, meeting.seconds
        self.store = open_store(*where) if rank == 0 else find_store(*where, address)
        self.meeting = replace(meeting, port=self.store.port)
        self.rank, self.address = rank, address
        self.posted: list[str] = []
        self._processes: dict[int, int] = {}  # open descriptors of the receivers' processes on this machine
        if rank and self.near:
            self.store.set(f"process/{rank}", str(os.getpid()))

    @property
    def near(self) -> bool:
        """Whether all processes are on this machine."""
        return self.meeting.host == LOOPBACK and hasattr(os, "pidfd_open")

    def post(self, key: str, text: str = "") -> None:
        """Write a key that `sweep` deletes."""
        self.posted.append(key)
        self.store.set(key, text)

    def await_receivers(self, name: str) -> None:
        """Wait until every receiver has written its key of this name; raises if one of this machine dies meanwhile."""
        keys = [f"{name}/{rank}" for rank in range(1, self.meeting.size)]
        began = time.monotonic()
        while not self.store.check(keys):  # a blocked `wait` would not notice a death
            waited = time.monotonic() - began
            if (dead := self._death(min(LOOK, int(waited * 250)))) is not None:  # ms: a quarter of the time so far
                raise WeightSyncError(f"the process of receiver {dead} has died")
            if waited > self.meeting.seconds:
                raise WeightSyncError(f"the receivers did not answer in {self.meeting.seconds:g} s")
        self.posted += keys

    def sweep(self) -> None:
        """Delete the keys of an attempt that is over."""
        for key in self.posted:
            self.store.delete_key(key)
        self.posted.clear()

    def _death(self, milliseconds: int) -> int | None:
        """Wait so long for the death of a receiver on this machine; returns its rank."""
        poll = select.poll()
        for rank in range(1, self.meeting.size) if self.near else ():
            if rank not in self._processes:
                if not self.store.check([key := f"process/{rank}"]):
                    continue
                try:
                    self._processes[rank] = os.pidfd_open(int(self.store.get(key)))
                except ProcessLookupError:
                    return rank
            poll.register(self._processes[rank], select.POLLIN)
        ended = poll.poll(milliseconds)
        return next((rank for rank, process in self._processes.items() if ended and process == ended[0][0]), None)

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process)
        self._processes.clear()
        del self.store


class Channel(ABC):
    """Moves the bytes of buckets in at most `SLOTS` buckets of memory."""

    peak = 0

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def room(self, index: int, size: int) -> Tensor:
        """Return memory for a bucket of `size` bytes at least; waits until an earlier bucket has left it."""

    def where(self, index: int) -> str:
        """Return where receivers find a bucket."""
        return ""

    @abstractmethod
    def send(self, attempt: int, index: int, data: Tensor) -> None:
        """Start to send a bucket, whose header is posted."""

    @abstractmethod
    def land(self, flying: int = 0) -> None:
        """Wait until at most `flying` buckets are under way; gives all up if that fails."""

    @abstractmethod
    def receive(self, attempt: int, headers: Iterator[Header]) -> Iterator[tuple[Header, Tensor]]:
        """Yield the buckets of these headers; each is valid until the next one is taken."""

    @abstractmethod
    def trim(self) -> None:
        """Free memory that is not worth keeping until the next version: that of a very large tensor."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""

    def count(self, held: Iterable[int]) -> None:
        """Note the sizes of the buckets that this process holds now."""
        self.peak = max(self.peak, sum(held))


class StreamSender:
    """Implements `Sender` by a channel. It packs a bucket while the one before travels."""

    def __init__(self, link: Link, channel: Channel, packing: Packing = AS_IS, bucket: int = BUCKET) -> None:
        self.meeting, self.packing, self.bucket = link.meeting, packing, bucket
        self._link, self._channel = link, channel
        self._attempts = 0

    @property
    def peak(self) -> int:
        return self._channel.peak

    def announce(self, version: Version, attempt: int = 0) -> WeightManifest:
        self._attempts = attempt or self._attempts + 1
        return WeightManifest(version, self._attempts)

    def send(self, manifest: WeightManifest, tensors: Named) -> None:
        learner = list[Exception]()

        def watched(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            try:
                yield from stream
            except Exception as error:
                learner.append(error)
                raise

        with torch.no_grad(), exhausted(iter(tensors)) as stream:  # other ranks of a sharded learner gather with this one
            try:
                self._send(manifest, watched(stream))
            except (RuntimeError, WeightSyncError) as error:  # torch raises the former: gloo, NCCL or the store
                if learner:
                    raise
                raise WeightSyncError(
                    f"Version {manifest.version} did not reach all engines; close this sender and meet anew: {_line(error)}."
                ) from error

    def _send(self, manifest: WeightManifest, tensors: Iterator[tuple[str, Tensor]]) -> None:
        attempt, version, index = manifest.attempt, manifest.version, 0

        def post(header: Header) -> None:
            self._link.post(f"{attempt}/{index}", header.encode())

        try:
            for entries, data in self._buckets(tensors):
                post(Header(version, tuple(entries), len(data), self._channel.where(index)))
                index += 1
                self._channel.send(attempt, index - 1, data)
            self._channel.land()
        except BaseException as error:
            with suppress(RuntimeError, WeightSyncError):  # the store, or what carries the buckets, may be what failed
                post(Header(version, error=f"{type(error).__name__}: {error}"))
                self._channel.land()
            raise
        post(Header(version))
        self._link.await_receivers(f"{attempt}/taken")
        self._link.sweep()
        self._channel.trim()

    def _buckets(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[list[Entry], Tensor]]:
        """Pack tensors into buckets; one that does not fit into a bucket has its own."""
        data, entries, end, index = torch.empty(0), list[Entry](), 0, 0
        for name, tensor in tensors:
            entry = self.packing.place(name, tensor, end)
            if entries and entry.end > self.bucket:
                yield entries, data[: max(end, 1)]
                entry, entries, index = self.packing.place(name, tensor, 0), [], index + 1
            if not entries:
                data = self._channel.room(index, max(self.bucket, entry.end))
            entries.append(self.packing.write(data, entry, tensor))
            end = entry.end
        if entries:
            yield entries, data[: max(end, 1)]

    def close(self) -> None:
        self._channel.close()
        self._link.close()


def _line(error: Exception) -> str:
    """The first line of torch's message, without its stack."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")


class StreamReceiver:
    """Implements `Receiver` by a channel."""

    def __init__(self, link: Link, channel: Channel) -> None:
        self._link, self._channel = link, channel

    @property
    def peak(self) -> int:
        return self._channel.peak

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        try:
            with exhausted(self._channel.receive(manifest.attempt, self._headers(manifest))) as buckets:
                for header, data in buckets:
                    _check(manifest, header)
                    yield from unpack(data, header.entries)
        except RuntimeError as error:  # raised by torch: gloo, NCCL or the store
            raise WeightSyncError(f"Version {manifest.version} did not arrive: {_line(error)}.") from error
        finally:
            self._channel.trim()

    def _headers(self, manifest: WeightManifest) -> Iterator[Header]:
        """The headers of an attempt's buckets, as the sender posts them."""
        for index in count():
            header = Header.decode(self._link.store.get(f"{manifest.attempt}/{index}"))
            if header.error:
                raise WeightSyncError(f"The sender of version {header.version} failed: {header.error}")
            if not header.entries:
                break
            yield header
        self._link.store.set(f"{manifest.attempt}/taken/{self._link.rank}", "")
        _check(manifest, header)

    def close(self) -> None:
        self._channel.close()
        self._link.close()


def _check(manifest: WeightManifest, header: Header) -> None:
    if header.version != manifest.version:
        raise WrongVersion(f"The manifest announces version {manifest.version}, the sender sends {header.version}.")
