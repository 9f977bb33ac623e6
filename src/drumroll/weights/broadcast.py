"""Weight sync by broadcast, for engines on any host: gloo in main memory, their own collectives between accelerators.

The process group is separate from torch's default group. Store and gloo listen on one address. A receiver reads a bucket
while the next one is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from drumroll.processes import accelerator
from drumroll.processes.rendezvous import LOOPBACK, device_group, gloo_group, gloo_options, meeting, steer_collectives
from drumroll.weights import AS_IS, BUCKET, Meeting, Packing
from drumroll.weights.stream import KEPT, SLOTS, Channel, Header, Link, StreamReceiver, StreamSender


class _Broadcast(Channel):
    def __init__(self, link: Link, bucket: int = BUCKET) -> None:
        super().__init__(link)
        self.bucket, self.device = bucket, link.meeting.device
        self._buffers: dict[int, Tensor] = {}
        self._works = deque[Any]()

    @cached_property
    def group(self) -> Any:
        """The process group, made with the first bucket, because making it waits until all ranks have joined."""
        wanted, address, rank = self.link.meeting, self.link.address, self.link.rank
        store = dist.PrefixStore("group", self.link.store)
        with meeting(store, rank, wanted.size, address, wanted.seconds):
            if self.device == "cpu":
                return gloo_group(store, rank, wanted.size, gloo_options(wanted.host, address, wanted.seconds))
            accelerator.select(self.device)
            steer_collectives(self.device, address)
            return device_group(self.device, store, rank, wanted.size, timedelta(seconds=wanted.seconds))

    def _buffer(self, index: int, size: int) -> Tensor:
        """Return a slot's memory."""
        buffer = self._buffers.get(index % SLOTS)
        if buffer is None or len(buffer) < size:
            self._buffers.pop(index % SLOTS, None)
            buffer = self._buffers[index % SLOTS] = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.count(map(len, self._buffers.values()))
        return buffer

    # --- the sender's side ---

    @override
    def room(self, index: int, size: int) -> Tensor:
        self.land(SLOTS - 1)
        return self._buffer(index, size)

    @override
    def send(self, attempt: int, index: int, data: Tensor) -> None:
        self._works.append(self.group.broadcast(data, 0))

    @override
    def land(self, flying: int = 0) -> None:
        """If a broadcast fails, drop the group, so that the other ranks need not wait."""
        try:
            while len(self._works) > flying:
                self._works.popleft().wait()
        except RuntimeError:
            self._works.clear()
            del self.group
            raise

    # --- a receiver's side ---

    @override
    def receive(self, attempt: int, headers: Iterator[Header]) -> Iterator[tuple[Header, Tensor]]:
        coming: tuple[Any, Header, Tensor] | None = None
        for index, header in enumerate(headers):
            data = self._buffer(index, header.size)[: header.size]
            before, coming = coming, (self.group.broadcast(data, 0), header, data)
            if before is not None:
                before[0].wait()
                yield before[1:]
        if coming is not None:
            coming[0].wait()
            yield coming[1:]

    # --- both ---

    @override
    def trim(self) -> None:
        kept = self._buffers.items() if self.device == "cpu" else ()
        self._buffers = {index: buffer for index, buffer in kept if len(buffer) <= KEPT * self.bucket}

    @override
    def close(self) -> None:
        self._buffers.clear()
        self.__dict__.pop("group", None)


class BroadcastSender(StreamSender):
    """Sends each bucket once to all receivers."""

    def __init__(self, meeting: Meeting, packing: Packing = AS_IS, bucket: int = BUCKET, address: str = LOOPBACK) -> None:
        link = Link(meeting, 0, address)
        super().__init__(link, _Broadcast(link, bucket), packing, bucket)


class BroadcastReceiver(StreamReceiver):
    """Takes part in every broadcast of its group, with a rank of 1 or higher."""

    def __init__(self, meeting: Meeting, rank: int, address: str = LOOPBACK) -> None:
        link = Link(meeting, rank, address)
        super().__init__(link, _Broadcast(link))
