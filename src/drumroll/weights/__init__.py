"""The weight bus: moves named tensors from a learner to engines. One file per transport beside this one.

    sender.send(version, (name, tensor)*) → manifest     the learner's side; the manifest travels by any RPC
    receiver.receive(manifest) → (name, tensor)*         the engine's side

`local` hands over the tensors themselves. `shared` writes them once into memory that all processes of a host can map.
`broadcast` streams them in buckets through a process group of its own. Full tensors go in and come out one at a time: a
sharded learner gathers one at a time, and an engine needs no second copy of all weights.

What was received is for reading, and stays as it is for as long as it is held, whatever is sent meanwhile. A version that
is half-written, overwritten or not the announced one is never given out. Nothing here knows a model, an engine or Ray.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from drumroll.errors import DrumrollError
from drumroll.sample import Version

Named = Iterable[tuple[str, Tensor]]
ALIGN = 64


class WeightSyncError(DrumrollError):
    """Weights that did not arrive."""


class WrongVersion(WeightSyncError):
    """The weights found are not those that the manifest announced."""


class Corrupted(WeightSyncError):
    """A tensor whose bytes changed on the way."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies among the bytes of a segment or bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What travels instead of weights: which version, and where it is. Only the local transport's holds tensors."""

    version: Version
    where: str = ""
    token: int = 0
    attempt: int = 0  # all who take part in a publication go by its number
    entries: tuple[Entry, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


class Sender(Protocol):
    """The learner's side."""

    def send(self, version: Version, tensors: Named) -> WeightManifest:
        """Offer a version: it can be received from now on. The tensors may not change until `wait` returns."""
        ...

    def wait(self) -> None:
        """Return when the tensors may change again; raises what went wrong on the way."""
        ...

    def close(self) -> None:
        """Free everything. Manifests not yet received are lost; tensors already received are not."""
        ...


class Receiver(Protocol):
    """The engine's side, one per process."""

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a manifest, one at a time."""
        ...

    def close(self) -> None:
        """Free everything but what is still held."""
        ...


@dataclass(frozen=True, slots=True)
class Packing:
    """How tensors become bytes: floating ones as `dtype` if one is given, with checksums on demand."""

    dtype: torch.dtype | None = None
    checksum: bool = False

    def place(self, name: str, tensor: Tensor, after: int) -> Entry:
        """The next place after so many bytes."""
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        begin = -(-after // ALIGN) * ALIGN
        return Entry(name, dtype, tuple(tensor.shape), begin, begin + tensor.numel() * dtype.itemsize)

    def write(self, data: Tensor, entry: Entry, tensor: Tensor) -> Entry:
        """Copy a tensor, of any device and strides, to its place."""
        _view(data, entry).copy_(tensor.detach())
        return self.seal(data, entry)

    def seal(self, data: Tensor, entry: Entry) -> Entry:
        """The entry with its checksum, if one is wanted."""
        return replace(entry, checksum=_checksum(data, entry)) if self.checksum else entry


AS_IS = Packing()


def unpack(data: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among some bytes, without a copy."""
    for entry in entries:
        if entry.checksum is not None and entry.checksum != _checksum(data, entry):
            raise Corrupted(f"The checksum of '{entry.name}' is not the sender's: its bytes changed on the way. Publish again.")
        yield entry.name, _view(data, entry)


def _view(data: Tensor, entry: Entry) -> Tensor:
    return data[entry.begin : entry.end].view(entry.dtype).view(entry.shape)


def _checksum(data: Tensor, entry: Entry) -> int:
    return zlib.crc32(data[entry.begin : entry.end].cpu().numpy().data)


def lend(address: int, size: int, give_back: Callable[[], object]) -> Tensor:
    """Memory as a tensor of bytes; `give_back`, which keeps it alive, is called when the last tensor made of it is gone."""
    held = (ctypes.c_byte * size).from_address(address)
    weakref.finalize(held, give_back)
    return torch.frombuffer(held, dtype=torch.uint8)


def settle(tensors: Iterable[Tensor]) -> None:
    """Move tensors next to each other in memory, type by type: neighbours are sent as they lie, without packing."""
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


class Local:
    """Both sides for engines in the learner's process: nothing moves, and what was received changes with the learner's."""

    def send(self, version: Version, tensors: Named) -> WeightManifest:
        return WeightManifest(version, weights=dict(tensors))

    def wait(self) -> None: ...

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        yield from manifest.weights.items()

    def close(self) -> None: ...
