"""Blocks of a model's weights: a rank that holds a part of a model reads only that part from its files.

Parameters start on the meta device, where they take no memory, and are filled block by block. Nobody holds a whole model
beside its own part.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drumroll.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Block:
    """Where elements of a parameter lie in a named tensor: a block of it, in row-major order."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Files = Mapping[str, Sequence[Block]]
"""The tensors in a model's files that are, one after another, the parameter of a name; only where they are not the same."""


class BlockSource(Protocol):
    """Named tensors, of which blocks can be read."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        ...

    def block(self, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a block of a tensor of this whole shape."""
        ...


class BlocksInMemory:
    """A model that is in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def block(self, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return self.tensors[name][_slices(offsets, sizes)]


class BlocksInFiles:
    """The safetensors files of a Hugging Face directory, mapped into memory, so that only the pages of a block are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = _files(folder)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def names(self) -> Iterable[str]:
        return self.file_of

    def block(self, name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        from safetensors import safe_open

        file = self.file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        found = self._open[file].get_slice(name)
        if found.get_shape() != list(shape):
            raise ModelError(
                f"model: {self.folder}: {name} has the shape {found.get_shape()}, but the config says {list(shape)}."
            )
        return found[_slices(offsets, sizes)] if len(shape) else found[...]


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    if not (folder / SINGLE).is_file():
        raise ModelError(
            f"model: {folder} has no safetensors files, which ranks need to read only their parts; load it with transformers, "
            "and save it with save_pretrained."
        )
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Modules made within the block have their parameters on the meta device; buffers are computed as always."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def replace_parameters(module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put other parameters in the places of some, also where several modules share one."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter in new:
                part._parameters[name] = new[parameter]


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory on a device, uninitialised; shared ones stay shared. Others move there."""
    memo: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if id(tensor) not in memo:
            memo[id(tensor)] = torch.empty_like(tensor, device=device)
        return memo[id(tensor)]

    shared: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                shared.setdefault(parameter, []).append((part, name))
    module._apply(real)
    for places in shared.values():
        (first, name), *others = places
        for part, other in others:
            part._parameters[other] = first._parameters[name]


def local_tensor(parameter: Tensor) -> Tensor:
    """The memory of a parameter on this rank."""
    found = parameter.detach()
    return found.to_local() if isinstance(found, DTensor) else found
