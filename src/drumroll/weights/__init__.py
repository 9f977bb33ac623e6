"""Weight sync: moves named tensors from a learner to engines. Each transport is one file in this package.

    sender.send(version, (name, tensor)*) → manifest     the learner's side; the manifest travels by any RPC
    receiver.receive(manifest) → (name, tensor)*         the engine's side

`shared` writes them once into memory that all processes of a host can map.
`broadcast` streams them in buckets through a separate process group. Full tensors go in and come out one at a time: a
sharded learner gathers one tensor at a time, and an engine needs no second copy of all weights.

Received tensors are read-only. They stay unchanged for as long as the receiver holds them, whatever is sent meanwhile.
A receiver never returns a version that is half-written, overwritten or other than the announced one. This package knows
nothing of models, engines or Ray.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from drumroll.errors import DrumrollError
from drumroll.sample import Version

Named = Iterable[tuple[str, Tensor]]
ALIGN = 64


class WeightSyncError(DrumrollError):
    """The weights did not arrive."""


class WrongVersion(WeightSyncError):
    """The weights found are not the version that the manifest announces."""


class Corrupted(WeightSyncError):
    """The bytes of a tensor changed in transit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of one tensor among the bytes of a segment or bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A description of one version of the weights: its number and where to get it."""

    version: Version
    where: str = ""
    token: int = 0
    attempt: int = 0  # all who take part in a publication go by its number
    entries: tuple[Entry, ...] = ()


class Sender(Protocol):
    """The learner's side of weight sync."""

    def send(self, version: Version, tensors: Named, attempt: int = 0) -> WeightManifest:
        """Offer a version to receivers, in an attempt that all who take part number alike; 0 counts the sender's own.

        The tensors must not change until `wait` returns.
        """
        ...

    def wait(self) -> None:
        """Wait until the tensors may change again; raise the error if sending failed."""
        ...

    def close(self) -> None:
        """Free everything. Receivers lose manifests that they have not yet received, but keep tensors that they have."""
        ...


class Receiver(Protocol):
    """The engine's side of weight sync, one per process."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a manifest, one at a time."""
        ...

    def close(self) -> None:
        """Free everything except tensors that are still held."""
        ...


@dataclass(frozen=True, slots=True)
class Packing:
    """How tensors become bytes: `dtype`, if set, is the type of floating-point tensors; `checksum` adds a CRC per tensor."""

    dtype: torch.dtype | None = None
    checksum: bool = False

    def place(self, name: str, tensor: Tensor, after: int) -> Entry:
        """Return the next aligned entry after `after` bytes."""
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        begin = -(-after // ALIGN) * ALIGN
        return Entry(name, dtype, tuple(tensor.shape), begin, begin + tensor.numel() * dtype.itemsize)

    def write(self, data: Tensor, entry: Entry, tensor: Tensor) -> Entry:
        """Copy a tensor of any device and strides to its entry's bytes."""
        _view(data, entry).copy_(tensor.detach())
        return self.seal(data, entry)

    def seal(self, data: Tensor, entry: Entry) -> Entry:
        """Return the entry with its checksum, if checksums are enabled."""
        return replace(entry, checksum=_checksum(data, entry)) if self.checksum else entry


AS_IS = Packing()


def unpack(data: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors stored in `data`, without copying. Raises `Corrupted` if a checksum differs."""
    for entry in entries:
        if entry.checksum is not None and entry.checksum != _checksum(data, entry):
            raise Corrupted(f"The checksum of '{entry.name}' is not the sender's: its bytes changed on the way. Publish again.")
        yield entry.name, _view(data, entry)


def _view(data: Tensor, entry: Entry) -> Tensor:
    return data[entry.begin : entry.end].view(entry.dtype).view(entry.shape)


def _checksum(data: Tensor, entry: Entry) -> int:
    return zlib.crc32(data[entry.begin : entry.end].cpu().numpy().data)


def lend(address: int, size: int, give_back: Callable[[], object]) -> Tensor:
    """Wrap memory as a tensor of bytes.

    `give_back` keeps the memory alive and is called when the last tensor made of it is gone.
    """
    held = (ctypes.c_byte * size).from_address(address)
    weakref.finalize(held, give_back)
    return torch.frombuffer(held, dtype=torch.uint8)


def settle(tensors: Iterable[Tensor]) -> None:
    """Move tensors of one dtype and device next to each other in memory: a transport sends neighbours without packing."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, device), alike in kinds.items():
        step = ALIGN // dtype.itemsize
        sizes = [-(-t.numel() // step) * step for t in alike]
        home = torch.empty(sum(sizes), dtype=dtype, device=device)
        for tensor, room in zip(alike, home.split(sizes), strict=True):
            place = room[: tensor.numel()].view(tensor.shape)
            place.copy_(tensor.data)
            tensor.data = place
