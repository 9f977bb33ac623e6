"""Weight sync: streams named tensors from a learner to engines, one bucket at a time.

    manifest = sender.announce(version)                  the learner's side; the manifest travels by any RPC
    sender.send(manifest, (name, tensor)*)               returns when all receivers have the version, or raises
    receiver.receive(manifest) → (name, tensor)*         the engine's side, at the same time

Full tensors go in and come out one at a time, each valid until the next one is taken: a sharded learner gathers one
tensor at a time, and an engine copies each into its parameters. Neither side holds more than two buckets beside its own
weights. A bucket is `BUCKET` bytes, or the largest tensor if that is larger.

`stream.py` is what all transports have in common: headers, attempts, errors. `shared_memory.py` and `broadcast.py` move
the bytes of a bucket. A receiver raises unless it got the whole announced version. This package knows nothing of models,
engines or Ray.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from drumroll.errors import DrumrollError
from drumroll.sample import Version

Named = Iterable[tuple[str, Tensor]]
Item = TypeVar("Item")
ALIGN = 64
BUCKET = 32 << 20
SHOWN = 3
"""The most names in an error message."""


class WeightSyncError(DrumrollError):
    """The weights did not arrive."""


class WrongVersion(WeightSyncError):
    """The weights found are not the version that the manifest announces."""


class Corrupted(WeightSyncError):
    """The bytes of a tensor changed in transit."""


class WrongWeights(DrumrollError):
    """The tensors are not those of the model that receives them; sending them again would not help."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of one tensor among the bytes of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address where a sender and its receivers meet, and their total number. With port 0 the sender picks a port.

    `kind` names the transport; buckets are on `device` (of `broadcast`: NCCL on CUDA, else gloo).
    """

    host: str
    port: int
    size: int
    device: str = "cpu"
    seconds: float = 300.0
    kind: str = "broadcast"


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Announces one version of the weights. All who take part in a publication go by the number of its attempt."""

    version: Version
    attempt: int


class Sender(Protocol):
    """The learner's side of weight sync."""

    meeting: Meeting

    @property
    def peak(self) -> int:
        """The most bytes of buckets held at once."""
        ...

    def announce(self, version: Version, attempt: int = 0) -> WeightManifest:
        """Return the manifest of a version, in an attempt that all who take part number alike; 0 counts the sender's own."""
        ...

    def send(self, manifest: WeightManifest, tensors: Named) -> None:
        """Send a version; returns when all receivers have it. All tensors are taken, also if sending fails."""
        ...

    def close(self) -> None:
        """Free everything. Receivers lose what they have not yet received."""
        ...


class Receiver(Protocol):
    """The engine's side of weight sync, one per process."""

    @property
    def peak(self) -> int:
        """The most bytes of buckets held at once."""
        ...

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a manifest, one at a time; each is read-only and valid until the next one is taken.

        Raises `WeightSyncError` if the whole version does not arrive.
        """
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@contextmanager
def exhausted(stream: Iterator[Item]) -> Generator[Iterator[Item]]:
    """Take what is left of a stream at the end of the block: other processes wait for one that stops early."""
    try:
        yield stream
    finally:
        with suppress(Exception):
            deque(stream, maxlen=0)


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


def fill(parameters: Mapping[str, Tensor], tensors: Named) -> None:
    """Copy a stream of tensors into the parameters of these names. It must hold each of them once, and no other."""
    missing = dict(parameters)
    with torch.no_grad():
        for name, tensor in tensors:
            own = missing.pop(name, None)
            if own is None:
                twice = name in parameters
                raise WrongWeights(
                    f"The weights hold '{name}' {'twice' if twice else 'but the model has no such parameter'}; "
                    "publish from the model that the engine was made of."
                )
            if own.shape != tensor.shape:
                raise WrongWeights(
                    f"'{name}' has the shape {tuple(tensor.shape)} in the weights and {tuple(own.shape)} in the model; "
                    "publish from the model that the engine was made of."
                )
            own.copy_(tensor)
    if missing:
        raise WrongWeights(f"The weights lack {len(missing)} of the model's {len(parameters)} parameters: {_some(missing)}.")


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(f"'{name}'" for name in shown[:SHOWN]) + (", ..." if len(shown) > SHOWN else "")
